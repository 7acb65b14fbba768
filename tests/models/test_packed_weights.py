"""A weight in another form than an array, known here alone: the layers multiply by it, and it is split by the same rules."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.drive import make_engine, make_request, serve
from support.spread import spread_module
from support.tiny import draft_config, llama_config, random_head, random_llama

from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.models.layers import Linear, RMSNorm
from eagle_jax.models.matmul import PackedWeight
from eagle_jax.parallel import make_mesh
from eagle_jax.parallel.partition import TENSOR_PARALLEL, parameter_axes, parameter_specs

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Rows:
    """Eight bits a value and a factor an output."""

    values: Any
    """int8 `[out, in]`."""
    factors: Any
    """float32 `[out]`."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def whole(self) -> jax.Array:
        return self.values * self.factors[:, None]

    def matmul(self, x: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
        return ((x @ self.values.T.astype(x.dtype)) * self.factors).astype(out_dtype)

    def axes(self, axes: tuple[str, ...]) -> Any:
        return Int8Rows(axes, axes[:1])


def packed(weight: jax.Array) -> Int8Rows:
    factors = jnp.abs(weight).max(axis=1) / 127
    return Int8Rows(jnp.round(weight / factors[:, None]).astype(jnp.int8), factors)


def linears(module: Any) -> list[Linear]:
    return [part for _, part in nnx.iter_graph(module) if isinstance(part, Linear)]


def quantise(module: Any, as_arrays: bool) -> Any:
    """The module with packed weights, or with what they stand for."""
    for linear in linears(module):
        weight = packed(linear.weight[...])
        linear.weight.set_value(weight.whole if as_arrays else weight)
    return module


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_packed_weights_decode_as_what_they_stand_for(tensor_parallel_size: int) -> None:
    """Output heads, too; split over devices, the factors go where the rows go."""
    requests = [make_request([3, 1], 30), make_request([5] * 9, 30)]

    def run(mesh: Any, as_arrays: bool) -> list[Any]:
        target = random_llama(llama_config(**HEADS), 1)
        head = random_head(draft_config(target.config, own_embedding=True, **HEADS), 2)
        target, head = (quantise(module, True) for module in (target, head))
        target, head = spread_module(target, mesh), spread_module(head, mesh)
        if not as_arrays:  # the same values again: largest ones are 127 factors
            target, head = (quantise(module, False) for module in (target, head))
            assert all(isinstance(linear.weight.get_value(), PackedWeight) for linear in linears(target))
        engine = make_engine(target, head, tree=TreeConfig.chain(2), slots=2, max_length=64, prefill_chunk=8, mesh=mesh)
        return serve(engine, requests)

    mesh = make_mesh(tensor_parallel_size)
    found, wanted = run(mesh, False), run(None, True)
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert len({token for one in found for token in one.token_ids}) > 5


def test_every_parameter_names_its_axes() -> None:
    target = quantise(random_llama(llama_config(**HEADS), 1), False)
    axes = parameter_axes(target)
    assert axes["embed.weight"] == axes["lm_head.weight"] == ("vocab", "embed")
    assert axes["layers.0.attention.out.weight"] == ("embed", "heads")
    spec = parameter_specs(target, TENSOR_PARALLEL)["layers"][0]["mlp"]["gate_up"]["weight"]
    assert spec == Int8Rows(jax.sharding.PartitionSpec("model"), jax.sharding.PartitionSpec("model"))
    target.norm = RMSNorm(4, eps=1e-6, dtype=jnp.float32)
    target.norm.weight = nnx.Param(np.ones(4, np.float32))
    with pytest.raises(ValueError, match=r"parameter norm\.weight names no logical axes"):
        parameter_axes(target)
    with pytest.raises(KeyError):
        TENSOR_PARALLEL.spec(("nothing",))
