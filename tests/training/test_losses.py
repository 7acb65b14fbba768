"""Losses and their gradients against PyTorch's autograd, and the walk of rounds against counting by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eagle_jax.training.acceptance import walk
from eagle_jax.training.losses import LossConfig, Truth, chunk_size, chunked_loss

K, B, T, H, V = 3, 2, 8, 6, 11
VOCABULARY = np.array([0, 2, 3, 7, 10], np.int32)


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(),
        LossConfig(kind="lk_hybrid", eta=2.0),
        LossConfig(token_weight=0.1, feature_weight=1.0),
    ],
    ids=["cross-entropy", "lk-hybrid", "feature"],
)
@pytest.mark.parametrize("chunk", [2, 8])
def test_loss_and_gradient_are_pytorchs(config, chunk):
    rng = np.random.default_rng(0)
    outputs, states = rng.normal(size=(K, B, T, H)).astype(np.float32), rng.normal(size=(B, T, H)).astype(np.float32)
    lm_head, own = rng.normal(size=(V, H)).astype(np.float32), rng.normal(size=(5, H)).astype(np.float32)
    weights = (rng.random((K, B, T)) * (rng.random((K, B, T)) > 0.3)).astype(np.float32)
    following = rng.integers(0, V, (B, T)).astype(np.int32)

    def truth(lm_head, states, following):
        full = states @ lm_head.T
        best = full.argmax(-1).astype(jnp.int32)
        return Truth(
            logits=full[..., VOCABULARY],
            probabilities=jax.nn.softmax(full[..., VOCABULARY], axis=-1),
            log_total=jax.nn.logsumexp(full, axis=-1),
            best=best,
            in_vocabulary=jnp.isin(best, jnp.asarray(VOCABULARY)),
            features=states,
            next_tokens=following,
        )

    @jax.jit
    def loss(own, outputs):
        return 3 * chunked_loss(
            lambda p, _, rows: rows @ p.T, truth, config, chunk, jnp.asarray(lm_head), jnp.asarray(VOCABULARY), own, outputs,
            jnp.asarray(states), jnp.asarray(following), jnp.asarray(weights),
        )[0]  # fmt: skip

    value, (to_own, to_outputs) = jax.value_and_grad(loss, argnums=(0, 1))(own, outputs)

    head, rows = torch.tensor(own, requires_grad=True), torch.tensor(outputs, requires_grad=True)
    full = torch.tensor(states) @ torch.tensor(lm_head).T
    log_q = torch.log_softmax(rows @ head.T, -1)
    target = torch.softmax(full[..., VOCABULARY], -1)
    token = -(target * log_q).sum(-1)
    if config.kind == "lk_hybrid":
        alpha = torch.minimum(torch.softmax(full, -1)[..., VOCABULARY], log_q.exp()).sum(-1)
        weight = torch.exp(-config.eta * alpha.detach())
        token = weight * token + (1 - weight) * (1 - alpha)
    counted = torch.tensor(np.isin(full.argmax(-1).numpy(), VOCABULARY))
    assert 0 < counted.float().mean() < 1
    expected = config.token_weight * token * counted
    if config.feature_weight:
        distance = torch.nn.functional.smooth_l1_loss(rows, torch.tensor(states).expand_as(rows), reduction="none")
        expected = expected + config.feature_weight * distance.mean(-1)
    total = 3 * (torch.tensor(weights) * expected).sum()
    total.backward()
    np.testing.assert_allclose(value, total.item(), rtol=1e-5)
    np.testing.assert_allclose(to_own, head.grad.numpy(), atol=2e-5)
    np.testing.assert_allclose(to_outputs, rows.grad.numpy(), atol=2e-5)


def test_chunks_divide_the_length():
    assert [chunk_size(1024, 32, n) for n in (4096, 1, 100_000)] == [128, 1, 1024]
    assert chunk_size(100, 2, 70) == 25


def test_rounds_are_walked_from_root_to_root():
    """A prompt of 2 tokens and an answer of 9 (tokens 2 to 10): row 1 drafts first, with token 2 as the root."""
    #                    row:  0  1  2  3  4  5  6  7  8  9 10
    matches = np.array([9, 2, 9, 9, 0, 3, 9, 9, 9, 5, 9])
    rounds = walk(matches, first=2, end=11, depth=3)
    # Root 2: 2 accepted, 3 emitted; root 5 (row 4): 0, 1; root 6 (row 5): 3, 4 emitted; that is token 10, the last.
    assert (rounds.rounds, rounds.emitted) == (3, 8)
    assert rounds.accepted_at_depth == (2, 2, 1)
    assert rounds.accepted_length == pytest.approx(8 / 3)
    shorter = walk(matches, first=2, end=10, depth=3)
    assert shorter.emitted == 7  # what lies beyond the end is cut
