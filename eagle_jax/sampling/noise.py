"""Random numbers that depend on nothing but a request's seed, a position, a purpose and an id.

Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is written out here, and not
taken from `jax.random`: no setting of JAX, no other row of the batch, no padding and no split of the vocabulary may change a
draw, and the arithmetic fuses into whatever reads the noise. A block of ids gets exactly the slice of the whole vocabulary's
noise.
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)

Words = tuple[jax.Array, jax.Array]
"""64 bits: two uint32 arrays of one shape."""


class Stream(enum.IntEnum):
    """What a random number is for. No two purposes share numbers."""

    TARGET = 0
    """The target's draw at a position; drafts that are to agree with it are ranked by the same numbers."""
    DRAFT = 1
    """Drafted tokens, where they are samples of their own."""
    ACCEPT = 2
    """Whether a drafted token is accepted."""
    RESAMPLE = 3
    """The token that ends a round whose drafts were tested by `ACCEPT`."""


def threefry_2x32(key: Words, counter: Words) -> Words:
    """Encrypts 64-bit counters under 64-bit keys; shapes broadcast."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << np.uint32(distance)) | (y >> np.uint32(32 - distance))
            y = x ^ y
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def seed_words(seed: int) -> np.ndarray:
    """A seed as uint32 `[2]`, low word first; negative seeds in two's complement."""
    bits = seed % 2**64
    return np.array([bits & 0xFFFFFFFF, bits >> 32], np.uint32)


def stream_key(seeds: jax.Array, positions: jax.Array, stream: Stream) -> Words:
    """The key of one stream at positions: shape `[...]` each word.

    Args:
      seeds: uint32 `[..., 2]`, as `seed_words` gives them.
      positions: int32, a shape that broadcasts with `seeds[..., 0]`.
      stream: the purpose.
    """
    positions = positions.astype(jnp.uint32)
    return threefry_2x32((seeds[..., 0], seeds[..., 1]), (positions, jnp.full_like(positions, int(stream))))


def uniform(key: Words, ids: jax.Array, lane: jax.Array | int = 0) -> jax.Array:
    """Float32 numbers in (0, 1], fine near 0 (steps of 2^-32): `key` and the integers `ids` and `lane` broadcast."""
    bits, _ = threefry_2x32(key, (ids.astype(jnp.uint32), jnp.asarray(lane).astype(jnp.uint32)))
    return (bits.astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32)


def gumbel(key: Words, ids: jax.Array, lane: jax.Array | int = 0) -> jax.Array:
    """Standard Gumbel noise, float32; arguments as `uniform`.

    The noise is large where the uniform number is small, which is where float32 is fine: up to 22.9. Below it ends at -2.9.
    """
    u = jnp.minimum(uniform(key, ids, lane), np.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-u))


def vocabulary_gumbel(key: Words, ids: jax.Array, lane: jax.Array | int = 0) -> jax.Array:
    """Gumbel noise for every id after every key: `[..., V]` from key words `[...]`, ids int32 `[V]`, lanes `[...]`."""
    return gumbel((key[0][..., None], key[1][..., None]), ids, jnp.asarray(lane)[..., None])
