"""The distributions that the reference enumerated, and what it sampled, agree with the processed distributions here."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import golden
from support.enumeration import p_value

from eagle_jax import SamplingParams
from eagle_jax.models import CacheContext
from eagle_jax.sampling import SamplingMode
from eagle_jax.sampling.processing import probabilities, process_logits
from eagle_jax.sampling.settings import SlotSettings

FOLDER = golden.COMMITTED / "sampling"


@pytest.mark.parametrize("name", ["A_e3_T1", "A_e3_T07p09"])
def test_distributions_and_samples_of_the_reference(name: str) -> None:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    arrays = dict(np.load(FOLDER / f"{name}.npz"))
    target = golden.target(data["target"])
    model, vocab_size, prompt = target.model, target.config.vocab_size, data["prompt_ids"]
    one = SlotSettings.of(SamplingParams(**data["sampling"]), 0, vocab_size, SamplingMode.SAMPLING)
    assert one is not None

    @jax.jit
    def after(tokens: jax.Array) -> jax.Array:
        count, size = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(size), (count, size))
        out = model(tokens, CacheContext(positions, model.empty_cache(count, 1), jnp.zeros((count,), jnp.int32)))
        logits = model.logits(out.hidden[:, -1:])  # [count, 1, V]
        slots = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *np.shape(x))), one)
        return probabilities(process_logits(logits, slots))[:, 0]

    p1 = np.asarray(after(jnp.asarray([prompt])))[0]
    np.testing.assert_allclose(p1, arrays["p1"], atol=3e-6)
    assert np.array_equal(p1 > 0, arrays["p1"] > 0)
    second = np.asarray(after(jnp.asarray([[*prompt, token] for token in range(vocab_size)])))
    np.testing.assert_allclose(p1 @ second, arrays["p2"], atol=3e-6)
    first, then = arrays["pairs"]
    np.testing.assert_allclose(p1[first] * second[first, then], arrays["p12"], atol=3e-6)
    # The reference's own draws, by speculative sampling with an EAGLE head.
    for samples, p in ((arrays["samples"][:, 0], p1), (arrays["samples"][:, 1], p1 @ second)):
        p = p.astype(np.float64)
        assert p_value(np.bincount(samples, minlength=vocab_size), p / p.sum()) > 1e-3
