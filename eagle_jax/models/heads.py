"""Every draft head behind one name, and the module that a configuration asks for."""

import jax.numpy as jnp
from flax import nnx

from eagle_jax.models.eagle import EagleHead
from eagle_jax.models.eagle3 import Eagle3Head
from eagle_jax.models.eagle_config import DraftConfig

DraftHead = EagleHead | Eagle3Head
"""A head: `fuse` the target's features, call it on rows, `logits` of its outputs, `target_ids` of draft ids."""


def make_head(config: DraftConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, shards: int = 1) -> DraftHead:
    """The head module of a configuration, with random weights, split over `shards` devices."""
    module = Eagle3Head if config.method == "eagle3" else EagleHead
    return module(config, dtype=dtype, rngs=rngs, shards=shards)
