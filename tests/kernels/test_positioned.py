"""Attention in blocks at fixed positions: the same values as the reference, and the same bits whatever is committed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import tree_attention

CAPACITY, DIM = 600, 16  # more than two blocks, and no whole number of them


def arrays(lengths, queries, tail, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shape = (len(lengths), 2)

    def normal(*sizes):
        return jnp.asarray(rng.standard_normal(sizes), dtype)

    return (
        normal(len(lengths), queries, 4, DIM), normal(*shape, CAPACITY, DIM), normal(*shape, CAPACITY, DIM),
        jnp.asarray(lengths, jnp.int32), normal(*shape, tail, DIM), normal(*shape, tail, DIM),
    )  # fmt: skip


def both(*args, **options):
    run = jax.jit(
        lambda *args, implementation, **options: tree_attention(
            *args, scale=0.25, implementation=implementation, **options
        ),
        static_argnames=("implementation", "soft_cap"),
    )
    return (np.asarray(run(*args, implementation=name, **options)) for name in ("xla_positioned", "xla"))


@pytest.mark.parametrize("window", [False, True])
def test_values_are_those_of_the_reference(window):
    lengths = (0, 1, 254, 256, 300, 511, CAPACITY - 9)
    args = arrays(lengths, 9, 9)
    mask = np.tril(np.ones((len(lengths), 9, 9), bool))
    mask[:, 5, 2] = mask[:, 7, :3] = False
    options = {"soft_cap": 20.0}
    if window:
        options["prefix_start"] = jnp.maximum(args[3][:, None] + jnp.arange(9) - 40, 0)
    for tail_mask in (None, jnp.asarray(mask)):
        ours, reference = both(*args, tail_mask, **options)
        np.testing.assert_allclose(ours, reference, atol=2e-6)


def test_rows_beyond_the_tail_are_never_read():
    args = list(arrays((0, 250, 300), 4, 4))
    clean, _ = both(*args)
    poison = np.arange(CAPACITY) >= np.asarray(args[3])[:, None]
    for i in (1, 2):
        args[i] = jnp.where(poison[:, None, :, None], jnp.nan, args[i])
    poisoned, _ = both(*args)
    assert np.array_equal(clean, poisoned)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("start", [3, 253, 511])
def test_committing_rows_of_a_chain_changes_no_bit(dtype, start):
    """The same chain of texts seen with 0 to 4 of its rows committed, across the border of a block too."""
    width, total = 5, 5 + 4
    rng = np.random.default_rng(start)
    keys, values = (jnp.asarray(rng.standard_normal((1, 2, start + total, DIM)), dtype) for _ in range(2))
    queries = jnp.asarray(rng.standard_normal((1, start + total, 4, DIM)), dtype)
    run = jax.jit(lambda *args: tree_attention(*args, scale=0.25, implementation="xla_positioned"))

    def rows(committed: int) -> np.ndarray:
        at = start + committed
        cache = jnp.zeros((1, 2, CAPACITY, DIM), dtype)
        out = run(
            queries[:, at : at + width], cache.at[:, :, :at].set(keys[:, :, :at]), cache.at[:, :, :at].set(values[:, :, :at]),
            jnp.asarray([at]), keys[:, :, at : at + width], values[:, :, at : at + width],
        )  # fmt: skip
        return np.asarray(out.astype(jnp.float32))[0]

    first = rows(0)
    for committed in range(1, width):
        assert np.array_equal(rows(committed)[: width - committed], first[committed:])
