"""The vocabulary map of a draft head: `d2t` holds offsets, so draft id i means target id `i + d2t[i]`."""

import numpy as np

from eagle_jax.loading.draft_names import RenamedSource
from eagle_jax.loading.errors import CheckpointError, listed


def read_vocabulary(source: RenamedSource, draft_vocab: int, vocab: int) -> np.ndarray | None:
    """Reads and checks the map from draft ids to target ids.

    Args:
      source: the head's tensors; `d2t` int `[Vd]` offsets, and `t2d` bool `[V]`, true for target ids that can be drafted.
      draft_vocab: Vd, the rows of the head's lm_head.
      vocab: V of the target.

    Returns:
      Target ids, int32 `[Vd]`; None when Vd == V, where the ids are the same.

    Raises:
      CheckpointError: the map is needed and absent, has the wrong length or type, leaves the vocabulary, maps two ids to one, or
        contradicts `t2d`.
    """
    names = source.names()
    if draft_vocab > vocab:
        raise CheckpointError(
            f"the head's output head has {draft_vocab} rows, more than the target's vocab_size {vocab}"
        )
    if "t2d" in names and source.shape("t2d") != (vocab,):
        raise CheckpointError(
            f"{source.stored_name('t2d')} has shape {source.shape('t2d')}; for this target's vocab_size it must be {(vocab,)}"
        )
    if "t2d" in names and source.dtype("t2d").kind not in "biu":
        raise CheckpointError(
            f"{source.stored_name('t2d')} is stored as {source.storage('t2d')}; it must hold booleans"
        )
    if "d2t" not in names:
        if draft_vocab < vocab:
            raise CheckpointError(
                f"the head drafts {draft_vocab} of the target's {vocab} tokens, but has no d2t (draft_id_to_target_id) that says "
                "which"
            )
        return None
    name = source.stored_name("d2t")
    if source.shape("d2t") != (draft_vocab,):
        raise CheckpointError(
            f"{name} has shape {source.shape('d2t')}; the output head's {draft_vocab} rows make it {(draft_vocab,)}"
        )
    if source.dtype("d2t").kind not in "iu":
        raise CheckpointError(f"{name} is stored as {source.storage('d2t')}; it must hold integers")
    offsets = source.read("d2t").astype(np.int64)
    ids = np.arange(draft_vocab) + offsets
    if (outside := np.flatnonzero((ids < 0) | (ids >= vocab))).size:
        i = outside[0]
        raise CheckpointError(
            f"{name}[{i}] = {offsets[i]} maps draft id {i} to target id {ids[i]}, outside 0..{vocab - 1}; {name} holds offsets, "
            "target id = i + d2t[i]"
        )
    unique, counts = np.unique(ids, return_counts=True)
    if unique.size != draft_vocab:
        raise CheckpointError(
            f"{name} maps several draft ids to one target id: {listed(unique[counts > 1])}; it holds offsets, target id = "
            "i + d2t[i]"
        )
    if draft_vocab == vocab:
        if offsets.any():
            raise CheckpointError(
                f"{name} must be all zeros, because the head drafts the whole vocabulary of {vocab} tokens"
            )
        return None
    if "t2d" in names:
        mask = source.read("t2d").astype(bool)
        if not np.array_equal(np.flatnonzero(mask), unique):
            raise CheckpointError(
                f"{source.stored_name('t2d')} marks {int(mask.sum())} target ids, {name} maps to {draft_vocab}; they must be the "
                "same ids"
            )
    return ids.astype(np.int32)
