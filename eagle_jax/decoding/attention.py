"""Which backend of tree attention the programs of a configuration get, told without compiling them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.parallel.partition import local_kv_heads
from pallas_kernels.backends import Choice, Device
from pallas_kernels.tree_attention import chosen_backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of one attention call: B slots, T new tokens each, and a cache of S rows."""

    slots: int
    tokens: int
    capacity: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: Any
    tree: bool
    """Whether the T new tokens are a tree and not consecutive."""
    windowed: bool = False
    """Whether a sliding window cuts the cache."""

    def arguments(self) -> dict[str, Any]:
        """Those of `tree_attention`, arrays as shapes."""
        new = (self.slots, self.tokens)
        cache = jax.ShapeDtypeStruct((self.slots, self.kv_heads, self.capacity, self.head_dim), self.dtype)
        tail = jax.ShapeDtypeStruct((self.slots, self.kv_heads, self.tokens, self.head_dim), self.dtype)
        masked = self.tree or self.windowed
        return {
            "queries": jax.ShapeDtypeStruct((*new, self.heads, self.head_dim), self.dtype),
            "cache_keys": cache,
            "cache_values": cache,
            "lengths": jax.ShapeDtypeStruct((self.slots,), jnp.int32),
            "tail_keys": tail,
            "tail_values": tail,
            "tail_mask": jax.ShapeDtypeStruct((*new, self.tokens), jnp.bool_) if masked else None,
            "prefix_start": jax.ShapeDtypeStruct(new, jnp.int32) if self.windowed else None,
            "scale": self.head_dim**-0.5,
        }

    def choice(self, device: jax.Device | Device) -> Choice:
        """The backend on a device, and why not those before it."""
        return chosen_backend(device, **self.arguments())

    @staticmethod
    def of(
        config: Any,
        dtype: Any,
        *,
        slots: int,
        tokens: int,
        capacity: int,
        tree: bool,
        windowed: bool = False,
        shards: int = 1,
    ) -> "AttentionShape":
        """For the heads of a `LlamaConfig` or `DraftConfig`, those of one of several shards."""
        return AttentionShape(
            slots=slots,
            tokens=tokens,
            capacity=capacity,
            heads=config.num_attention_heads // shards,
            kv_heads=local_kv_heads(config.num_key_value_heads, shards),
            head_dim=config.head_dim,
            dtype=np.dtype(dtype),
            tree=tree,
            windowed=windowed,
        )
