"""A head as training keeps it: its trained arrays in a flat dictionary, the rest beside it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.models import DraftConfig, DraftHead, Llama, make_head
from eagle_jax.parallel.partition import Axes, parameter_axes

Parameters = dict[str, jax.Array]
"""Arrays by their path in the module, such as "layers.0.mlp.down.weight"."""

OUTPUT_SIDE = ("norm.", "lm_head.")
"""Paths of what comes between the head's output and its logits."""


@dataclasses.dataclass(frozen=True)
class HeadTemplate:
    """The structure of a head's module; hashable, so that it can be part of a compiled program."""

    config: DraftConfig

    @property
    def axes(self) -> dict[str, Axes]:
        """Logical axes of every array by its path."""
        return parameter_axes(self._abstract())

    def _abstract(self) -> DraftHead:
        return nnx.eval_shape(lambda: make_head(self.config, dtype=jnp.float32, rngs=nnx.Rngs(0)))

    def build(self, parameters: Mapping[str, Any], vocabulary: Any) -> DraftHead:
        """The module with these arrays.

        Args:
          parameters: every trained array.
          vocabulary: target ids of the draft vocabulary, int32 `[Vd]`; not read where Vd == V.
        """
        graph, state = nnx.split(self._abstract())
        filled = []
        for path, variable in nnx.to_flat_state(state):
            name = ".".join(map(str, path))
            filled.append((path, variable.replace(vocabulary if name == "vocabulary" else parameters[name])))
        return nnx.merge(graph, nnx.from_flat_state(filled))


def split_head(head: DraftHead) -> tuple[Parameters, jax.Array]:
    """The trained arrays of a module, and its draft vocabulary as target ids, int32 `[Vd]`."""
    _, state = nnx.split(head)
    flat = {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}
    vocabulary = flat.pop("vocabulary", None)
    if vocabulary is None:
        vocabulary = jnp.arange(head.config.draft_vocab_size, dtype=jnp.int32)
    return flat, vocabulary


def initial_parameters(
    config: DraftConfig, target: Llama, vocabulary: np.ndarray, *, seed: int, from_embedding: bool
) -> Parameters:
    """Float32 arrays to start from.

    Args:
      config: the head.
      target: the target; gives the output head its first values where `from_embedding`.
      vocabulary: target ids, int32 `[Vd]`.
      seed: of the random arrays.
      from_embedding: start the head's output head from the target's rows of the draft vocabulary and its norm from the target's
        final norm, so that it reads the target's last state as the target does.

    Raises:
      ValueError: `from_embedding` for a head of another width than the target's.
    """
    parameters, _ = split_head(make_head(config, dtype=jnp.float32, rngs=nnx.Rngs(seed)))
    if not from_embedding or not config.own_lm_head:
        return parameters
    if config.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"a head of hidden_size {config.hidden_size} cannot start from the output head of a target of width "
            f"{config.target_hidden_size}"
        )
    rows = target.embed.weight[...] if target.lm_head is None else target.lm_head.weight[...]
    parameters["lm_head.weight"] = rows[vocabulary].astype(jnp.float32)
    if "norm.weight" in parameters:
        parameters["norm.weight"] = target.norm.weight[...].astype(jnp.float32)
    return parameters
