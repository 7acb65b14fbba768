"""Every published kind of head loads and drafts as its definition does, at every depth."""

import numpy as np
import pytest
from published_heads import ROWS, Written, written
from support.draft_chain import chain
from support.torch_heads import TorchHead

from eagle_jax import Draft, Target, load_draft

KNOWN, DEPTH = 7, 4


def compare(target: Target, draft: Draft, head: Written, atol: float = 1e-4) -> None:
    """Drafts a chain with both, from the same features."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, head.vocab, KNOWN + 1).tolist()
    features = 2 * rng.standard_normal((KNOWN, draft.config.feature_size))
    ends = [np.asarray(module.weight[...], np.float64) for module in (target.model.embed, target.model.lm_head)]
    reference = TorchHead(head.tensors, head.reading, *ends)
    wanted, wanted_ids = reference.chain(tokens, features, DEPTH)
    got, got_ids = chain(target, draft, tokens, features, DEPTH)
    assert wanted[0].std() > 0.1, "a flat head proves nothing"
    assert got_ids == wanted_ids
    for depth in range(DEPTH):
        assert wanted[depth].shape == (head.draft_vocab,)
        np.testing.assert_allclose(got[depth], wanted[depth], atol=atol, err_msg=f"depth {depth + 1}")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.repository)
def test_a_published_head_drafts_as_its_definition(tmp_path, row):
    target, head = written(row, tmp_path / "head")
    draft = load_draft(head.folder, target)
    assert draft.config.method == row.method
    assert draft.config.capture_layers == (row.capture or (row.target_layers,))
    assert draft.config.own_embedding == (row.embedding == "own")
    compare(target, draft, head)
