"""The models of these tests, loaded once."""

import pytest
from pairs import golden_pair, tiny_pair

from eagle_jax import Draft, Target


@pytest.fixture(scope="session")
def pair() -> tuple[Target, Draft]:
    return golden_pair()


@pytest.fixture(scope="session")
def target(pair) -> Target:
    return pair[0]


@pytest.fixture(scope="session")
def draft(pair) -> Draft:
    return pair[1]


@pytest.fixture(scope="session")
def tiny() -> tuple[Target, Draft]:
    return tiny_pair()
