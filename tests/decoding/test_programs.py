"""Properties of the compiled programs themselves: no transfers, no constants, no arrays that grow where they should not."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden
from support.drive import make_engine, make_plan, prefill_slots, prompt_chunks
from support.tiny import abstract_state, draft_config, llama_config, random_head, random_llama

from eagle_jax.decoding.loop import decode, init_state, prefill
from eagle_jax.decoding.plan import Plan, Weights
from eagle_jax.drafters.registry import DrafterSpec
from eagle_jax.drafters.tree import TreeConfig, ancestor_mask
from eagle_jax.models import Eagle3Head, Llama
from eagle_jax.sampling import SamplingMode

TREE = TreeConfig(total_tokens=10, depth=2, top_k=3)
TINY = llama_config(num_hidden_layers=2)


def abstract_round(
    tree: TreeConfig | None, *, max_length: int = 64, target: Any = TINY, slots: int = 2
) -> tuple[Any, ...]:
    """Plan and arguments of `decode` as shapes."""
    target_def, target_state = abstract_state(Llama, target, jnp.float32)
    head_def, head_state = (None, None)
    if tree is not None:
        head_def, head_state = abstract_state(Eagle3Head, draft_config(target), jnp.float32)
    plan = Plan(
        target_def=target_def,
        drafter=None if head_def is None else DrafterSpec("eagle3", head_def),
        tree=tree,
        slots=slots,
        max_length=max_length,
        prefill_chunk=16,
    )
    weights = Weights(target_state, head_state)
    state = jax.eval_shape(init_state, plan, weights)
    return plan, weights, state, np.ones((slots,), bool), np.int32(9), np.int32(99)


def subjaxprs(jaxpr: Any) -> Iterator[Any]:
    """A closed jaxpr and all that its equations hold."""
    yield jaxpr
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in inner.eqns:
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from subjaxprs(value)


def primitives(jaxpr: Any) -> set[str]:
    return {e.primitive.name for j in subjaxprs(jaxpr) for e in getattr(j, "jaxpr", j).eqns}


def constant_bytes(jaxpr: Any) -> int:
    """Bytes of all constants, each counted once, literals included."""
    found: dict[int, int] = {}
    for closed in subjaxprs(jaxpr):
        for value in getattr(closed, "consts", ()):
            found[id(value)] = getattr(value, "nbytes", 0)
        for equation in getattr(closed, "jaxpr", closed).eqns:
            for operand in equation.invars:
                value = getattr(operand, "val", None)
                found[id(value)] = getattr(value, "nbytes", 0)
    return sum(found.values())


@pytest.mark.parametrize("tree", [None, TREE], ids=["plain", "tree"])
def test_weights_are_arguments_and_nothing_leaves_the_device(tree: TreeConfig | None) -> None:
    wide = dataclasses.replace(TINY, hidden_size=256, intermediate_size=512)
    plan, *arguments = abstract_round(tree, target=wide)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments[0])) > 2**21
    traced = jax.make_jaxpr(decode, static_argnums=0)(plan, *arguments)
    names = primitives(traced)
    assert {"while", "dot_general"} <= names
    assert not {n for n in names if "callback" in n or n in ("infeed", "outfeed", "device_put")}
    assert constant_bytes(traced) < 2**20
    chunk = next(prompt_chunks(plan, 0, [0], 2))
    assert constant_bytes(jax.make_jaxpr(prefill, static_argnums=0)(plan, *arguments[:2], chunk)) < 2**20


def test_the_search_for_constants_and_callbacks_finds_them() -> None:
    table = jnp.ones((1024, 1024))

    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: None, x)
        return x @ table

    traced = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: inner(y), x))(jnp.ones((1, 1024)))
    assert constant_bytes(traced) >= 2**22
    assert any("callback" in name for name in primitives(traced))


def test_a_dispatch_runs_without_a_transfer() -> None:
    plan, weights = make_plan(
        random_llama(TINY, 0), random_head(draft_config(TINY), 1), TREE, slots=2, max_length=64, prefill_chunk=16
    )
    state = prefill_slots(plan, weights, [[1, 2, 3], [4]], [40, 40])
    arguments = jax.device_put((np.ones((2,), bool), np.int32(1000), np.int32(99)))
    program = decode.lower(plan, weights, state, *arguments).compile()
    with jax.transfer_guard("disallow"):
        state, report = jax.block_until_ready(program(weights, state, *arguments))
    slots = plan.layout.unpack(report)
    assert [slots[b].length for b in range(2)] == [39, 39]
    assert any(len(slots[b].round_lengths) < 38 for b in range(2)), "several tokens a round, several rounds a dispatch"
    assert "custom-call" not in "".join(line for line in program.as_text().splitlines() if "callback" in line)
    # The state is consumed: its buffers are reused, not copied.
    memory = program.memory_analysis()
    cache = sum(x.nbytes for x in jax.tree.leaves((state.target_cache, state.draft.cache)))
    assert memory.alias_size_in_bytes >= cache


def test_no_state_grows_with_the_context_times_the_tree() -> None:
    def sizes(max_length: int, nodes: int) -> list[int]:
        tree = TreeConfig(total_tokens=nodes, depth=4, top_k=8)
        _, _, state, *_ = abstract_round(tree, max_length=max_length)
        return [x.size for x in jax.tree.leaves(state)]

    for few, many in zip(sizes(64, 6), sizes(64, 60), strict=True):
        assert few == many, "the tree lives in a round, not in the state"
    short, long = sum(sizes(1024, 60)), sum(sizes(4096, 60))
    assert long < 4.1 * short


def test_memory_does_not_grow_with_the_context_times_the_tree() -> None:
    """Neither masks nor scores nor a copy of a cache: a round's temporaries hardly know the length of the context."""

    def temporaries(max_length: int, nodes: int) -> int:
        tree = TreeConfig(total_tokens=nodes, depth=2, top_k=7)
        plan, *arguments = abstract_round(tree, max_length=max_length, slots=1)
        return decode.lower(plan, *arguments).compile().memory_analysis().temp_size_in_bytes

    lengths, nodes = (1000, 4000), (16, 64)
    sizes = {(length, count): temporaries(length, count) for length in lengths for count in nodes}
    mixed = sizes[4000, 64] - sizes[4000, 16] - sizes[1000, 64] + sizes[1000, 16]
    cells = mixed / ((4000 - 1000) * (64 - 16))
    print(f"{cells:.2f} bytes for each node and row of the context; {sizes}")
    # A mask would take a byte or more, scores 4 for each head.
    assert cells < 0.1
    # The ids of the tokens and the accepted lengths are copied, 4 bytes each; a row of the draft cache has 128.
    assert sizes[4000, 64] - sizes[1000, 64] < 10 * (4000 - 1000)
    assert sizes[1000, 64] > sizes[1000, 16], "the temporaries are those of the tree"


def test_the_ancestor_mask_is_derived_from_parents() -> None:
    rng = np.random.default_rng(0)
    parents = np.stack([[-1, *(rng.integers(0, i) for i in range(1, 12))] for _ in range(4)])
    mask = np.asarray(ancestor_mask(jnp.asarray(parents, jnp.int32), 11))
    for b in range(4):
        for node in range(12):
            path = {node}
            while parents[b, node] >= 0:
                node = int(parents[b, node])
                path.add(node)
            start = max(path)
            assert set(np.flatnonzero(mask[b, start])) == path


@pytest.mark.parametrize("slots", [1, 4])
def test_no_program_copies_the_caches(slots: int) -> None:
    """Prefill may cut its own slot out of several; nothing else may grow with the caches."""
    engine = make_engine(
        golden.target("target_A").model, None, tree=None, slots=slots, max_length=8192, prefill_chunk=16
    )
    engine.programs.compile(SamplingMode.GREEDY)
    state = jax.eval_shape(init_state, engine.programs.plan, engine.programs.weights)
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.target_cache))
    assert cache > 10e6
    assert engine.programs.temporary_bytes < cache * (0.1 if slots == 1 else 1.2 / slots)
