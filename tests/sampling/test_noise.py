"""The noise is Threefry's, belongs to a seed, a position, a purpose and an id, and to nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from eagle_jax.sampling.noise import Stream, gumbel, seed_words, stream_key, threefry_2x32, uniform, vocabulary_gumbel


def words(*values: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.uint32(value) for value in values)


@pytest.mark.parametrize(
    ("key", "counter", "wanted"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_vectors(key, counter, wanted):
    """Known answers of Random123, the authors' own implementation."""
    assert tuple(int(x) for x in threefry_2x32(words(*key), words(*counter))) == wanted


def test_threefry_is_that_of_jax():
    keys = np.random.default_rng(0).integers(0, 2**32, (2, 50), np.uint32)
    ours = threefry_2x32((jnp.asarray(keys[0]), jnp.asarray(keys[1])), words(0, 7))
    for i in range(50):
        key = jax.random.wrap_key_data(jnp.asarray(keys[:, i]), impl="threefry2x32")
        theirs = jax.random.key_data(jax.random.fold_in(key, 7))
        assert [int(ours[0][i]), int(ours[1][i])] == theirs.tolist()


def keys(positions, stream=Stream.TARGET, seed=11):
    return stream_key(jnp.asarray(seed_words(seed)), jnp.asarray(positions), stream)


@pytest.mark.parametrize(("start", "end"), [(0, 5), (3, 49152), (24576, 49152), (49151, 49152), (1, 2)])
def test_a_block_of_ids_has_the_slice_of_the_whole(start, end):
    whole = np.asarray(jax.jit(vocabulary_gumbel)(keys([3, 9]), jnp.arange(49152)))
    part = np.asarray(jax.jit(vocabulary_gumbel)(keys([3, 9]), jnp.arange(start, end)))
    assert np.array_equal(part, whole[:, start:end])


def test_noise_does_not_depend_on_what_is_drawn_beside_it():
    """Up to the last digit of the logarithms, which the CPU computes by several numbers or one at a time."""
    alone = np.asarray(vocabulary_gumbel(keys([5]), jnp.arange(100)))[0]
    seeds = jnp.asarray(np.stack([seed_words(s) for s in (4, 11, 2**40)]))
    batch = vocabulary_gumbel(stream_key(seeds[:, None], jnp.asarray([[4, 5, 6]] * 3), Stream.TARGET), jnp.arange(100))
    np.testing.assert_allclose(np.asarray(batch)[1, 1], alone, rtol=1e-6, atol=1e-6)
    with jax.default_prng_impl("rbg"), jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        again = np.asarray(jax.jit(vocabulary_gumbel)(keys([5]), jnp.arange(100)))[0]
    np.testing.assert_allclose(again, alone, rtol=1e-6, atol=1e-6)


def test_seeds_positions_streams_lanes_and_ids_all_matter():
    draws = [
        vocabulary_gumbel(keys([5]), jnp.arange(8)),
        vocabulary_gumbel(keys([6]), jnp.arange(8)),
        vocabulary_gumbel(keys([5], seed=12), jnp.arange(8)),
        vocabulary_gumbel(keys([5], seed=11 + 2**32), jnp.arange(8)),
        vocabulary_gumbel(keys([5], seed=-11), jnp.arange(8)),
        vocabulary_gumbel(keys([5], Stream.DRAFT), jnp.arange(8)),
        vocabulary_gumbel(keys([5], Stream.ACCEPT), jnp.arange(8)),
        vocabulary_gumbel(keys([5], Stream.RESAMPLE), jnp.arange(8)),
        vocabulary_gumbel(keys([5]), jnp.arange(8), lane=jnp.asarray([1])),
    ]
    values = np.concatenate([np.asarray(draw).ravel() for draw in draws])
    assert len(set(values.tolist())) == values.size


def test_negative_seeds_are_their_two_s_complement():
    assert seed_words(-1).tolist() == [2**32 - 1, 2**32 - 1]
    assert seed_words(-(2**63)).tolist() == [0, 2**31]


def test_noise_has_a_gumbel_distribution_with_a_long_upper_end():
    noise = np.asarray(jax.jit(gumbel)(keys(0), jnp.arange(2_000_000)), np.float64)
    assert np.isfinite(noise).all()
    assert stats.kstest(noise[:200_000], "gumbel_r").pvalue > 1e-3
    # float32 numbers near 1 are coarse: 1 - u would end at 16.6, with gaps long before.
    tail = np.sort(noise)[-2000:]
    assert len(np.unique(tail)) == 2000
    assert stats.kstest(tail - np.sort(noise)[-2001], "expon").pvalue > 1e-3


def test_uniform_numbers_are_never_0():
    smallest = uniform((jnp.uint32(0), jnp.uint32(0)), jnp.arange(4_000_000)).min()
    assert 0 < smallest < 1e-5
