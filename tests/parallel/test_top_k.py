"""The k largest entries of long rows, against numpy's stable sort."""

import jax
import numpy as np
import pytest

from eagle_jax.parallel.top_k import top_k


@pytest.mark.parametrize(
    ("length", "k"), [(16384, 10), (32000, 1), (32001, 10), (49157, 128), (5000, 3), (2049, 2), (97, 5)]
)
@pytest.mark.parametrize("kind", ["normal", "ties", "mostly -inf", "all equal"])
def test_largest_first_and_ties_to_the_lower_index(length: int, k: int, kind: str) -> None:
    rng = np.random.default_rng(length + k)
    x = rng.standard_normal((2, 3, length)).astype(np.float32)
    if kind == "ties":
        x = np.round(x)
    elif kind == "mostly -inf":
        x[rng.random(x.shape) < 0.9995] = -np.inf
    elif kind == "all equal":
        x[:] = 1
    values, places = jax.jit(top_k, static_argnums=1)(x, k)
    wanted = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(places, wanted)
    np.testing.assert_array_equal(values, np.take_along_axis(x, wanted, -1))


def test_long_rows_are_not_searched_whole() -> None:
    """What is handed to XLA's own search is short: otherwise nothing is gained."""
    text = jax.jit(top_k, static_argnums=1).lower(jax.ShapeDtypeStruct((10, 32000), np.float32), 10).as_text()
    searched = [line for line in text.splitlines() if "top_k" in line and "x32000x" in line.split("->")[0]]
    assert "top_k" in text
    assert not searched
