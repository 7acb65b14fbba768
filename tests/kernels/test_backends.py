"""Which backend a call of tree attention gets, how one is forced, and what JAX's transformations make of the operation."""

import functools
import re
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends import Device
from pallas_kernels.tree_attention import backends, chosen_backend, tree_attention
from pallas_kernels.tree_attention.backends import choose
from pallas_kernels.tree_attention.reference import reference_tree_attention

HOPPER = Device("cuda", "NVIDIA H200", "9.0")
T4 = Device("cuda", "Tesla T4", "7.5")
OPTIONS = {"scale": 0.25, "soft_cap": None}


def make(batch: int = 2, queries: int = 3, capacity: int = 300, dim: int = 8, heads: int = 4) -> dict[str, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32)

    return {
        "queries": normal(batch, queries, heads, dim),
        "cache_keys": normal(batch, 2, capacity, dim),
        "cache_values": normal(batch, 2, capacity, dim),
        "lengths": jnp.arange(5, 5 + batch, dtype=jnp.int32),
        "tail_keys": normal(batch, 2, queries, dim),
        "tail_values": normal(batch, 2, queries, dim),
    }


def shapes(**sizes: int) -> list[Any]:
    """Arguments of `choose`."""
    return [*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in make(**sizes).values()), None, None]


def test_the_platform_decides() -> None:
    assert chosen_backend(jax.devices()[0], **make(), scale=0.25).name == "xla_blocked"
    choice = choose(T4, shapes(), OPTIONS)
    assert choice.name == "xla_blocked"
    assert choice.refusals == {
        "mosaic_gpu": "it needs a Hopper GPU (compute capability 9.0), and this is Tesla T4 (7.5)"
    }
    unknown = choose(Device("cuda"), shapes(), OPTIONS)
    assert (unknown.name, list(unknown.refusals)) == ("xla_blocked", ["mosaic_gpu"])
    assert choose(Device("rocm", "AMD Instinct MI300X"), shapes(), OPTIONS).name == "xla_blocked"


def test_a_backend_that_cannot_do_a_call_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(queries: jax.Array, *_: Any, **__: Any) -> jax.Array:
        if queries.shape[1] > 3:
            raise NotImplementedError(f"{queries.shape[1]} queries are too many")
        return queries

    monkeypatch.setitem(backends._LOADERS, "mosaic_gpu", lambda device: picky)
    backends._prepared.cache_clear()
    few, many = choose(HOPPER, shapes(queries=3), OPTIONS), choose(HOPPER, shapes(queries=4), OPTIONS)
    assert (few.name, few.refusals) == ("mosaic_gpu", {})
    assert (many.name, many.refusals) == ("xla_blocked", {"mosaic_gpu": "4 queries are too many"})
    with pytest.raises(NotImplementedError, match="on NVIDIA H200: mosaic_gpu: 4 queries are too many"):
        choose(HOPPER, shapes(queries=4), OPTIONS, "mosaic_gpu")
    backends._prepared.cache_clear()


@pytest.mark.parametrize("name", ["mosaic_tpu", "mosaic_gpu"])
def test_a_forced_backend_says_what_is_missing(name: Any) -> None:
    message = rf"on cpu: {name}: it runs on .*, and this program is compiled for cpu"
    with pytest.raises(NotImplementedError, match=message):
        tree_attention(**make(), scale=0.25, implementation=name)
    with pytest.raises(NotImplementedError, match=message):
        chosen_backend(jax.devices()[0], **make(), scale=0.25, implementation=name)


def test_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("implementation='cuda' is unknown; choose one of mosaic_tpu, ")):
        tree_attention(**make(), scale=1.0, implementation="cuda")  # type: ignore[arg-type]


def test_equal_layers_share_one_function_and_the_backend_of_the_lowered_platform() -> None:
    arrays = make()

    def layers(queries: jax.Array) -> jax.Array:
        for _ in range(4):
            queries = tree_attention(**(arrays | {"queries": queries}), scale=0.25)
        return queries

    text = jax.jit(layers).lower(arrays["queries"]).as_text()
    assert text.count("stablehlo.while") == 1
    exported = jax.export.export(jax.jit(layers), platforms=["cpu", "cuda"])(arrays["queries"])
    np.testing.assert_allclose(exported.call(arrays["queries"]), layers(arrays["queries"]), rtol=1e-5, atol=1e-6)


def test_precision_is_that_of_the_call() -> None:
    """The backend is traced later, when the context around the call is left."""

    def call(precision: str | None) -> str:
        def f(arrays: dict[str, jax.Array]) -> jax.Array:
            with jax.default_matmul_precision(precision):
                return tree_attention(**arrays, scale=0.25)

        with jax.default_matmul_precision("bfloat16"):
            return jax.jit(f).lower(make()).as_text()

    text = call("highest")
    assert "precision = [HIGHEST, HIGHEST]" in text
    assert "precision = [DEFAULT, DEFAULT]" not in text
    assert "HIGHEST" not in call("bfloat16")


def test_gradients_and_maps_are_those_of_the_reference() -> None:
    arrays = make(batch=1, queries=2, capacity=12, heads=2)
    floats = {k: v for k, v in arrays.items() if k != "lengths"}

    def loss(function: Any) -> Any:
        def f(floats: dict[str, jax.Array]) -> jax.Array:
            return jnp.sum(jnp.sin(function(**floats, lengths=arrays["lengths"])))

        return jax.value_and_grad(f)(floats)

    def reference(**arrays: jax.Array) -> jax.Array:
        return reference_tree_attention(**arrays, tail_mask=None, prefix_start=None, scale=0.25, soft_cap=None)

    def operation(**arrays: jax.Array) -> jax.Array:
        return tree_attention(**arrays, scale=0.25)

    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, loss(operation), loss(reference))
    stacked = {k: jnp.stack([v, v + 1]) for k, v in arrays.items()}
    mapped = jax.vmap(lambda x: operation(**x))(stacked)
    for i in range(2):
        close(mapped[i], operation(**{k: v[i] for k, v in stacked.items()}))
    with jax.disable_jit():
        close(operation(**arrays), reference(**arrays))


def test_shards_of_heads_and_slots() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    spec = jax.sharding.PartitionSpec
    arrays = make()
    specs = {k: spec("data", "model") for k in arrays} | {
        "queries": spec("data", None, "model"),
        "lengths": spec("data"),
    }
    sharded = jax.shard_map(
        lambda x: tree_attention(**x, scale=0.25), mesh=mesh, in_specs=(specs,), out_specs=specs["queries"]
    )
    np.testing.assert_allclose(jax.jit(sharded)(arrays), tree_attention(**arrays, scale=0.25), rtol=1e-5, atol=1e-6)


def test_kernels_of_other_platforms_are_not_imported() -> None:
    code = """
import jax, sys
import jax.numpy as jnp
from pallas_kernels.tree_attention import tree_attention
x = jnp.ones((1, 1, 1, 8))
tree_attention(x, x, x, jnp.zeros(1, int), x, x, scale=1.0)
print([name for name in sys.modules if name.startswith("jax.experimental.pallas") or "tree_attention.mosaic" in name])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("version", "platform"), [("PJRT C API\ncuda 13000", "cuda"), ("PJRT C API\nrocm 70000", "rocm")]
)
def test_a_client_that_calls_itself_gpu_is_told_apart(version: str, platform: str) -> None:
    """JAX 0.11 names the client of both makes "gpu"; with it, `chosen_backend` named the backend of unknown platforms."""
    client = types.SimpleNamespace(platform="gpu", platform_version=version)
    device = types.SimpleNamespace(client=client, device_kind="NVIDIA H200", compute_capability="9.0")
    assert Device.of(device) == Device(platform, "NVIDIA H200", "9.0")
