"""What the compiled programs of several devices hold: few collectives, and nothing of a mesh where it is one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.drive import make_engine
from support.spread import spread_module
from support.tiny import draft_config, llama_config, random_head, random_llama

from eagle_jax.decoding.loop import decode, state_shapes
from eagle_jax.decoding.placement import everywhere, spread
from eagle_jax.drafters.tree import TreeConfig
from eagle_jax.engine.core import EngineCore
from eagle_jax.parallel import make_mesh
from eagle_jax.parallel.counting import count_collectives, total_of
from eagle_jax.parallel.mesh import DATA, MODEL

LAYERS = 3
TARGET = llama_config(num_hidden_layers=LAYERS, vocab_size=9)
HEAD = draft_config(TARGET, num_attention_heads=4, num_key_value_heads=2, head_dim=8, own_embedding=True)
TREE = TreeConfig(total_tokens=8, depth=2, top_k=3)


def lowered_round(engine: EngineCore) -> jax.stages.Lowered:
    plan, weights = engine.programs.plan, engine.programs.weights
    steering = (np.ones((plan.slots,), bool), np.int32(1), np.int32(1))
    return decode.lower(plan, weights, state_shapes(plan, weights), *everywhere(steering, plan.mesh))


def engine_of(tp: int, draft_tp: int, data: int = 1) -> EngineCore:
    mesh = make_mesh(tp, data)
    target, head = spread_module(random_llama(TARGET, 0), mesh), spread_module(random_head(HEAD, 1), mesh, draft_tp)
    return make_engine(target, head, tree=TREE, slots=2 * data, max_length=64, prefill_chunk=8, mesh=mesh)


@pytest.mark.parametrize("draft_tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_collectives_of_a_round(draft_tp: int) -> None:
    lowered = lowered_round(engine_of(2, draft_tp))
    counts = count_collectives(lowered.compile().as_text())
    print(counts)
    # After o and down of each layer, after the embedding, for the choice of the token; one more for trees drafted apart.
    assert total_of(counts, "verify") == 2 * LAYERS + 2
    assert total_of(counts) - total_of(counts, "draft") <= 2 * LAYERS + 4
    step = 2 + 1 + 1  # o and down, the embedding, the top-k
    drafting = {1: 0, 2: 1 + step * (TREE.depth + 1)}[draft_tp]  # fc once, for the extend step and each level
    agreement = 1
    # XLA makes one of the sums after the embedding and after fc, which do not wait for each other.
    merged = 1 if draft_tp > 1 else 0
    assert total_of(counts, "draft") == drafting + agreement - merged
    # What `eagle-jax plan` falls back on where a compiled program cannot be printed.
    before = count_collectives(lowered.as_text(dialect="hlo", debug_info=True))
    assert total_of(before) == total_of(counts) + merged


@pytest.mark.slow
def test_groups_of_slots_share_nothing() -> None:
    """No collective over the axis "data", so that groups can run different numbers of rounds."""
    counts = count_collectives(lowered_round(engine_of(1, 1, data=2)).compile().as_text())
    assert counts == {}


def test_the_count_finds_collectives_in_loops_and_conditions() -> None:
    mesh = make_mesh(2)
    assert mesh is not None

    def body(x: jax.Array, n: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            with jax.named_scope("draft"):
                return jnp.sin(jax.lax.psum(x, MODEL)), None

        def rounds(x: jax.Array) -> jax.Array:
            x, _ = jax.lax.scan(step, x, None, length=5)
            with jax.named_scope("verify"):
                return jax.lax.cond(x.sum() > 0, lambda x: jax.lax.all_gather(x, MODEL).sum(0), lambda x: x, x)

        return jax.lax.while_loop(lambda x: x.sum() < n, rounds, x)

    whole = jax.sharding.PartitionSpec()
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False))
    counts = count_collectives(program.lower(jnp.ones(3), jnp.ones(())).compile().as_text())
    assert counts == {"draft": {"all-reduce": 5}, "verify": {"all-gather": 1}}


def test_a_mesh_of_one_device_is_no_mesh() -> None:
    mesh = make_mesh(1, 1, devices=jax.devices()[:1])
    assert mesh is not None
    assert make_mesh(1, 1) is None
    target, head = random_llama(TARGET, 0), random_head(HEAD, 1)
    options = {"tree": TREE, "slots": 2, "max_length": 64, "prefill_chunk": 8}
    without, with_mesh = make_engine(target, head, **options), make_engine(target, head, **options, mesh=mesh)
    assert without.programs.plan == with_mesh.programs.plan, "equal plans share their programs"
    text = lowered_round(with_mesh).as_text()
    assert text == lowered_round(without).as_text()
    assert "all_reduce" not in text
    assert "manual_computation" not in text


def test_arrays_without_elements_do_not_enter_a_mesh() -> None:
    """jax 0.11.2 ends the process where they do."""
    mesh = make_mesh(2, 2)

    def body(x: jax.Array, empty: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        assert empty["a"].shape == (4, 0)
        assert empty["b"].dtype == jnp.int32
        return x + empty["a"].sum(), empty["b"]

    specs = (PartitionSpec(DATA), PartitionSpec(DATA)), (PartitionSpec(DATA), PartitionSpec(DATA))
    program = spread(body, mesh, *specs)
    arguments = jnp.arange(8.0), {"a": jnp.zeros((8, 0)), "b": jnp.zeros((8, 0, 3), jnp.int32)}
    (equation,) = (e for e in jax.make_jaxpr(program)(*arguments).eqns if e.primitive.name == "shard_map")
    assert [x.aval.shape for x in equation.invars] == [(8,)]
    same, empty = jax.jit(program)(*arguments)
    np.testing.assert_array_equal(same, np.arange(8.0))
    assert empty.shape == (8, 0, 3)
