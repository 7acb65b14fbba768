"""Rejection sampling: which drafts are accepted by chance, so that the output has the target's distribution.

p is the target's processed distribution after a node, q the one that the node's children were drawn from. All random numbers of a
round are keyed by its root's position, which no two rounds of a request share: a draft that was proposed but not emitted has told
something about the numbers behind it, so the same position must not see them again.

A token of probability 0 under p is never accepted: comparisons are strict there, and NaN compares false. Where a residual is
empty, which exact arithmetic rules out, p itself is sampled.
"""

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decoding.accept import Acceptance, accept
from eagle_jax.decoding.rules import Rule
from eagle_jax.decoding.state import DecodeState
from eagle_jax.decoding.verify import TargetOutput
from eagle_jax.drafters.tree import DraftTree, StaticTree
from eagle_jax.sampling.noise import Stream, stream_key, uniform, vocabulary_gumbel
from eagle_jax.sampling.processing import choose_possible, probabilities


def accept_by(rule: Rule, tree: DraftTree, output: TargetOutput, state: DecodeState, max_depth: int) -> Acceptance:
    """Accepts by the rule in slots that sample, and what the target's likeliest tokens agree with in greedy ones."""
    if rule.name == "synthetic":
        return synthetic_acceptance(rule, tree, output, state, max_depth)
    matched = accept(tree, output, max_depth)
    if state.sampling is None or rule.exact_match:
        return matched
    assert output.processed is not None
    methods = {"standard": walk, "recursive": walk, "block": block, "traversal": traversal}
    # Residuals and sums run over whole rows, many times: gathered once, they are the same on every shard of a vocabulary.
    processed = state.sampling.vocabulary.whole(output.processed)
    leaf, last = methods[rule.name](tree, probabilities(processed), node_uniforms(state, tree))
    tested = Acceptance.up_to(leaf, resample(last, state), tree, output.ancestors, max_depth)
    greedy = state.sampling.settings.greedy

    def either(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(greedy.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(either, matched, tested)


def node_uniforms(state: DecodeState, tree: DraftTree) -> jax.Array:
    """The number that tests each node, float32 `[B, N]` in (0, 1]."""
    assert state.sampling is not None
    first, second = stream_key(state.sampling.settings.seeds, state.lengths, Stream.ACCEPT)
    return uniform((first[:, None], second[:, None]), jnp.arange(tree.tokens.shape[1], dtype=jnp.int32))


def resample(distribution: jax.Array, state: DecodeState) -> jax.Array:
    """Draws the token that ends a round, int32 `[B]`, from unnormalised probabilities `[B, V]`."""
    assert state.sampling is not None
    key = stream_key(state.sampling.settings.seeds, state.lengths, Stream.RESAMPLE)
    noise = vocabulary_gumbel(key, jnp.arange(distribution.shape[-1], dtype=jnp.int32))
    return choose_possible(jnp.log(distribution) + noise)


def walk(tree: DraftTree, target: jax.Array, uniforms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From the root down: tests the children of a node one after the other, and goes on below the first that is accepted.

    Chains of sampled drafts are tested as by Leviathan et al. (https://arxiv.org/abs/2211.17192); siblings sampled without
    replacement as by SpecInfer. Without `tree.probabilities` every draft stands for a distribution of its own that has no other
    token, which suits trees of any shape.

    Args:
      tree: nodes level by level, siblings in the order in which they were drawn.
      target: p after each node, `[B, N, V]`.
      uniforms: `[B, N]`.

    Returns:
      The last accepted node int32 `[B]`, and what the token after it is drawn from, `[B, V]`.
    """
    proposals = tree.probabilities
    slots = jnp.arange(tree.tokens.shape[0])

    def test(n: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        at, p, q = carry
        token = tree.tokens[:, n]
        tried = tree.parents[:, n] == at
        chance = q[slots, token] if proposals is not None else jnp.ones(at.shape)
        wanted = p[slots, token]
        accepted = tried & (wanted > 0) & (chance > 0) & (uniforms[:, n] * chance <= wanted)
        rest = residual(p, q) if proposals is not None else without(p, token)
        remaining = without(q, token) if proposals is not None else q

        def go_on(if_accepted: jax.Array, if_rejected: jax.Array, otherwise: jax.Array) -> jax.Array:
            return jnp.where(accepted[:, None], if_accepted, jnp.where(tried[:, None], if_rejected, otherwise))

        p = go_on(target[:, n], rest, p)
        q = go_on(proposals[:, n], remaining, q) if proposals is not None else q
        return jnp.where(accepted, n, at), p, q

    start = jnp.zeros(slots.shape, jnp.int32), target[:, 0], target[:, 0] if proposals is None else proposals[:, 0]
    at, p, _ = jax.lax.fori_loop(1, tree.tokens.shape[1], test, start)
    return at, p


def residual(p: jax.Array, q: jax.Array, rate: jax.Array | float = 1.0) -> jax.Array:
    """`max(rate * p - q, 0)` over the last axis, normalised; p where nothing is left."""
    return normalised(jnp.maximum(rate * p - q, 0), p)


def without(p: jax.Array, token: jax.Array) -> jax.Array:
    """`[B, V]` without the token int32 `[B]`, normalised; zeros where nothing is left."""
    rest = p.at[jnp.arange(p.shape[0]), token].set(0)
    return normalised(rest, jnp.zeros_like(p))


def normalised(weights: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Weights over the last axis that sum to 1, `otherwise` where they are all 0."""
    total = weights.sum(-1, keepdims=True)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), otherwise)


def block(tree: DraftTree, target: jax.Array, uniforms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Block verification of a chain (https://arxiv.org/abs/2403.10444): its longest beginning that passes a joint test.

    Arguments and results as in `walk`; node i is the i-th of the chain.
    """
    assert tree.probabilities is not None
    drafted = tree.tokens[:, 1:, None]
    p = jnp.take_along_axis(target[:, :-1], drafted, axis=-1)[..., 0]  # [B, D]
    q = jnp.take_along_axis(tree.probabilities[:, :-1], drafted, axis=-1)[..., 0]
    ratios = jnp.where(q > 0, p / jnp.where(q > 0, q, 1), 0)
    rates = [jnp.ones(tree.tokens.shape[0])]
    for d in range(ratios.shape[1]):
        rates.append(jnp.minimum(rates[-1] * ratios[:, d], 1))
    rate = jnp.stack(rates, axis=1)  # [B, D + 1], that of the chain up to each node
    excess = jnp.maximum(rate[..., None] * target - tree.probabilities, 0)  # [B, D + 1, V]
    mass = excess.sum(-1)
    passes = jnp.where(rate < 1, mass / jnp.where(rate < 1, mass + (1 - rate), 1), 1)
    passes = jnp.concatenate([passes[:, :-1], rate[:, -1:]], axis=1)  # nothing follows the last node
    accepted = ((uniforms <= passes) & (passes > 0)).at[:, 0].set(True)
    steps = jnp.arange(accepted.shape[1], dtype=jnp.int32)
    leaf = jnp.max(jnp.where(accepted, steps, 0), axis=1)
    at = leaf[:, None, None]
    own = jnp.take_along_axis(target, at, axis=1)[:, 0]
    rest = normalised(jnp.take_along_axis(excess, at, axis=1)[:, 0], own)
    return leaf, jnp.where((leaf == steps[-1])[:, None], own, rest)


def traversal(tree: DraftTree, target: jax.Array, uniforms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Traversal verification (https://arxiv.org/abs/2505.12398): from the leaves up, the first path that passes a joint test.

    A depth-first walk; rate, p and q of the nodes that are open lie in a stack by depth. Arguments and results as in
    `walk`, of a static tree.
    """
    assert tree.probabilities is not None
    assert tree.shape is not None
    proposals, shape = tree.probabilities, tree.shape
    batch, depth, slots = tree.tokens.shape[0], shape.max_depth, jnp.arange(tree.tokens.shape[0])
    # Entering a node opens it; leaving it, behind all its children, decides on it.
    nodes, entering = (jnp.asarray(x) for x in depth_first(shape))
    depths = jnp.asarray(shape.depths)

    def enter(carry: tuple[jax.Array, ...], n: jax.Array) -> tuple[jax.Array, ...]:
        done, leaf, last, rate, p, q = carry
        d, token = depths[n], tree.tokens[:, n]
        wanted, chance = p[slots, d - 1, token], q[slots, d - 1, token]
        own = jnp.minimum(rate[:, d - 1] * jnp.where(chance > 0, wanted / jnp.where(chance > 0, chance, 1), 0), 1)
        return (
            done, leaf, last,
            rate.at[:, d].set(own), p.at[:, d].set(target[:, n]), q.at[:, d].set(proposals[:, n]),
        )  # fmt: skip

    def leave(carry: tuple[jax.Array, ...], n: jax.Array) -> tuple[jax.Array, ...]:
        done, leaf, last, rate, p, q = carry
        d, token = depths[n], tree.tokens[:, n]
        passed = (n == 0) | ((uniforms[:, n] <= rate[:, d]) & (rate[:, d] > 0))
        new = passed & ~done
        leaf, last = jnp.where(new, n, leaf), jnp.where(new[:, None], p[:, d], last)
        # The parent goes on without this child. For the root, which has no parent, this changes what is not read any more.
        above = jnp.maximum(d - 1, 0)
        parent_rate, parent_p, parent_q = rate[:, above], p[:, above], q[:, above]
        excess = jnp.maximum(parent_rate[:, None] * parent_p - parent_q, 0)
        mass = excess.sum(-1)
        left = mass + (1 - parent_rate)
        return (
            done | passed, leaf, last,
            rate.at[:, above].set(jnp.where(left > 0, mass / jnp.where(left > 0, left, 1), 1)),
            p.at[:, above].set(normalised(excess, parent_p)),
            q.at[:, above].set(without(parent_q, token)),
        )  # fmt: skip

    def visit(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return jax.lax.cond(entering[i], enter, leave, carry, nodes[i])

    stack = jnp.zeros((batch, depth + 1, target.shape[-1]), jnp.float32)
    start = (
        jnp.zeros((batch,), bool), jnp.zeros((batch,), jnp.int32), target[:, 0],
        jnp.ones((batch, depth + 1), jnp.float32), stack.at[:, 0].set(target[:, 0]), stack.at[:, 0].set(proposals[:, 0]),
    )  # fmt: skip
    _, leaf, last, *_ = jax.lax.fori_loop(0, nodes.shape[0], visit, start)
    return leaf, last


def depth_first(shape: StaticTree) -> tuple[np.ndarray, np.ndarray]:
    """The steps of a depth-first walk: node int32 `[2N - 1]`, and whether it is entered or left; the root is only left."""
    steps: list[tuple[int, bool]] = []

    def visit(node: int) -> None:
        for child in np.flatnonzero(shape.parents == node):
            steps.append((int(child), True))
            visit(int(child))
        steps.append((node, False))

    visit(0)
    return np.array([node for node, _ in steps], np.int32), np.array([entering for _, entering in steps])


def synthetic_acceptance(
    rule: Rule, tree: DraftTree, output: TargetOutput, state: DecodeState, max_depth: int
) -> Acceptance:
    """Accepts as many drafts of a chain as one number a round says; the token after them is the target's."""
    rates = jnp.asarray(rule.synthetic_rates(max_depth), jnp.float32)
    leaf = jnp.sum(node_uniforms(state, tree)[:, :1] <= rates, axis=1, dtype=jnp.int32)
    bonus = jnp.take_along_axis(output.choices, leaf[:, None], axis=1)[:, 0]
    return Acceptance.up_to(leaf, bonus, tree, output.ancestors, max_depth)
