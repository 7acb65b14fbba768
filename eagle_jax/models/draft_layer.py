"""What EAGLE heads of every generation share: both ends, and their cache."""

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.models.cache import KVCache
from eagle_jax.models.eagle_config import DraftConfig
from eagle_jax.models.layers import Embedding, Linear, RMSNorm
from eagle_jax.parallel.partition import check_divisible
from eagle_jax.parallel.vocabulary import Vocabulary


class VocabularyMap(nnx.Variable):
    """Target id of each draft id, int32 `[Vd]`."""


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
        self.lm_head = Linear(width, rows, axes=("vocab", "embed"), dtype=dtype, rngs=rngs) if own else None
        mapped = config.draft_vocab_size < config.vocab_size
        self.vocabulary = (
            VocabularyMap(jnp.arange(config.draft_vocab_size, dtype=jnp.int32), axes=(None,)) if mapped else None
        )

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
        return KVCache.zeros([spec.kv for spec in self.config.layers], slots, capacity, self.dtype, self.shards)

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
        return self.draft_vocabulary.hide_padding(self.lm_head(self.before_lm_head(hidden), jnp.float32))

    def target_ids(self, draft_ids: jax.Array) -> jax.Array:
        """Target ids of draft ids, int32 of any shape; those of padding mean nothing."""
        return draft_ids if self.vocabulary is None else self.vocabulary[...][draft_ids]
