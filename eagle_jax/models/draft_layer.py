"""What EAGLE heads of every generation share: their calling convention, and rows that attend within it."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.models.cache import KVCache, KVRows
from eagle_jax.models.eagle_config import DraftConfig
from eagle_jax.models.layers import MLP, Attention, Embedding, Linear, RMSNorm, sliding_window
from eagle_jax.models.matmul import matmul
from eagle_jax.parallel.partition import check_divisible, local_kv_heads
from eagle_jax.parallel.vocabulary import Vocabulary


class VocabularyMap(nnx.Variable):
    """Target id of each draft id, int32 `[Vd]`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftContext:
    """What T new draft rows of every slot attend to."""

    positions: jax.Array
    """Rotary positions of the new rows, int32 `[B, T]`."""
    cache: KVCache
    """Committed draft rows."""
    lengths: jax.Array
    """Number of committed draft rows, int32 `[B]`."""
    tail: KVRows | None = None
    """Uncommitted draft rows in buffers of M rows, into which the new rows are written; None: the new rows are the whole tail."""
    tail_offset: jax.Array | int = 0
    """First of the T rows in `tail`, int32 scalar."""
    tail_mask: jax.Array | None = None
    """bool `[B, T, M]`, the tail rows that each new row sees; None means causal, without `tail`."""
    tail_positions: jax.Array | None = None
    """Rotary positions of the tail rows, int32 `[B, M]`; read by sliding windows. None: those of the new rows."""

    def window(self, size: int | None) -> tuple[jax.Array | None, jax.Array | None]:
        """`prefix_start [B, T]` and tail mask of a layer that sees `size` tokens back, itself included (None: everything)."""
        if size is None:
            return None, self.tail_mask
        tail_positions = self.positions if self.tail_positions is None else self.tail_positions
        return sliding_window(size, self.positions, tail_positions, self.tail_mask)

    def attend(
        self, layer: "DraftLayer", inputs: jax.Array, phases: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The attention of a layer over `[B, T, in]`: its output `[B, T, h]`, and the tail with the new rows."""
        prefix_start, tail_mask = self.window(layer.sliding_window)
        return layer.attention(
            inputs,
            phases,
            self.cache.layer(layer.index),
            self.lengths,
            tail=None if self.tail is None else self.tail.layer(layer.index),
            tail_offset=self.tail_offset,
            tail_mask=tail_mask,
            prefix_start=prefix_start,
        )


class RowContext(Protocol):
    """What draft rows attend to, and how: `DraftContext` in decoding, `eagle_jax.training.forward.StepContext` in training."""

    @property
    def positions(self) -> jax.Array:
        """Rotary positions of the rows, int32 `[B, T]`."""

    def attend(
        self, layer: "DraftLayer", inputs: jax.Array, phases: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The attention of a layer over `[B, T, in]`: its output `[B, T, h]`, and what `KVRows.of` takes of a layer."""


class DraftLayer(nnx.Module):
    """Attention over `attention_inputs`, then the MLP, each added to the residual stream."""

    def __init__(
        self, config: DraftConfig, index: int, *, in_features: int, shards: int, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        width = config.hidden_size
        self.attention = Attention(
            in_features,
            width,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            shards=shards,
            dtype=dtype,
            rngs=rngs,
        )
        self.post_norm = RMSNorm(width, eps=config.rms_norm_eps, dtype=dtype)
        inner, bias = config.intermediate_size, config.mlp_bias
        self.mlp = MLP(width, inner, bias=bias, shards=shards, dtype=dtype, rngs=rngs)
        self.index = index
        self.sliding_window = config.sliding_windows[index] if config.sliding_windows else None

    def __call__(
        self,
        residual: jax.Array,
        attention_inputs: jax.Array,
        phases: tuple[jax.Array, jax.Array],
        context: RowContext,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Runs the layer on `[B, T, h]`; returns its output and the context's keys and values, as `KVRows.of` takes them."""
        with jax.named_scope(f"draft_layer_{self.index}"):
            mixed, rows = context.attend(self, attention_inputs, phases)
            x = residual + mixed
            return x + self.mlp(self.post_norm(x)), rows


class DraftModule(nnx.Module):
    """What heads of every generation have at both ends: an embedding and an output head where they own them, and a vocabulary."""

    layers: nnx.List
    norm: RMSNorm | None
    """Norm of the output."""

    def __init__(self, config: DraftConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, shards: int = 1):
        check_divisible(config, shards, whose="the draft head", size_name="draft_tensor_parallel_size")
        self.config, self.shards = config, shards
        own, width = config.own_embedding, config.hidden_size
        self.embed = Embedding(config.vocab_size, width, shards=shards, dtype=dtype, rngs=rngs) if own else None

    def _end(self, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Adds the output side; called last, so that layers are drawn in the order in which they run."""
        config = self.config
        own, width = config.own_lm_head, config.hidden_size
        rows = self.draft_vocabulary.padded_size
        self.lm_head = Linear(width, rows, dtype=dtype, rngs=rngs) if own else None
        mapped = config.draft_vocab_size < config.vocab_size
        self.vocabulary = VocabularyMap(jnp.arange(config.draft_vocab_size, dtype=jnp.int32)) if mapped else None

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of weights, activations and cache."""
        return self.layers[0].post_norm.weight.dtype

    @property
    def draft_vocabulary(self) -> Vocabulary:
        """What of the draft vocabulary a device has logits of, by the own output head."""
        return Vocabulary(self.config.draft_vocab_size, self.shards)

    @property
    def feeds_back_normed(self) -> bool:
        """Whether the output is normed before it is fed back; otherwise `norm` comes before the output head alone."""
        raise NotImplementedError

    def empty_cache(self, slots: int, capacity: int) -> KVCache:
        """A draft cache for `slots` sequences of up to `capacity` rows: of one shard, if there are several."""
        config = self.config
        kv_heads = local_kv_heads(config.num_key_value_heads, self.shards)
        return KVCache.zeros(config.num_hidden_layers, slots, kv_heads, capacity, config.head_dim, self.dtype)

    def output(self, x: jax.Array) -> jax.Array:
        """What the head returns and takes back of the last layer's output, `[B, T, h]`."""
        return self.norm(x) if self.norm is not None and self.feeds_back_normed else x

    def before_lm_head(self, hidden: jax.Array) -> jax.Array:
        """What an output head, the own or the target's, reads of outputs `[B, R, h]`."""
        return hidden if self.norm is None or self.feeds_back_normed else self.norm(hidden)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits over the draft vocabulary, `[B, R, Vd]`, of outputs `[B, R, h]`; over shards, the columns of one.

        Raises:
          ValueError: the head has no output head of its own (`DraftConfig.own_lm_head`): the target's is to be used.
        """
        if self.lm_head is None:
            raise ValueError("this head has no output head of its own; use the target's")
        logits = matmul(self.before_lm_head(hidden), self.lm_head.weight[...], out_dtype=jnp.float32)
        return self.draft_vocabulary.hide_padding(logits)

    def target_ids(self, draft_ids: jax.Array) -> jax.Array:
        """Target ids of draft ids, int32 of any shape; those of padding mean nothing."""
        return draft_ids if self.vocabulary is None else self.vocabulary[...][draft_ids]
