"""What the host reads after a dispatch: the tokens that are new, in one small array of integers."""

import dataclasses
import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decoding.sampling_state import LogProbs
from eagle_jax.decoding.state import TAGS, DecodeState

REPORT_TOKENS = 128
"""Tokens of a slot that a report holds; more where two rounds can emit more."""


def report_tokens(max_depth: int) -> int:
    """Tokens of a slot that a report holds at most: W."""
    return max(REPORT_TOKENS, 2 * (max_depth + 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What a dispatch gives to the host: what every slot added since the last report."""

    packed: jax.Array
    """int32 `[B, 4 + D + W]`; see `ReportLayout`."""
    log_probs: LogProbs | None
    """Of the new tokens; only with `SamplingMode.FULL`."""

    @staticmethod
    def of(state: DecodeState, *, log_probs: bool) -> "Report":
        """Packs what of a state the host reads."""
        head = (state.generations, state.finish, state.lengths, state.unread.counts)
        packed = jnp.concatenate([jnp.stack(head, axis=1), state.accepted_at_depth, state.unread.codes], axis=1)
        return Report(packed, state.sampling.log_probs if log_probs and state.sampling is not None else None)

    def copy_to_host(self) -> None:
        """Starts the copy, which then runs beside the next dispatch."""
        for leaf in jax.tree.leaves(self):
            leaf.copy_to_host_async()


@dataclasses.dataclass(frozen=True)
class TokenLogProbs:
    """Log-probabilities at one place of an output."""

    chosen: float
    """Of the token that was emitted."""
    rank: int
    """How many tokens were at least as likely, itself included."""
    top: list[tuple[int, float]]
    """The likeliest tokens, best first: `MAX_LOGPROBS` of them."""


@dataclasses.dataclass(frozen=True)
class SlotReport:
    """What a dispatch added to the request in one slot."""

    generation: int
    """Which request it is (`DecodeState.generations`)."""
    finish: int
    """`RUNNING`, `STOPPED` or `LENGTH`."""
    length: int
    """Tokens of prompt and output, less 1: the last one has no row in the cache."""
    token_ids: list[int]
    """New tokens."""
    round_lengths: list[int]
    """Tokens of each new round, bonus included, after cutting at stop and budget. The first token of an output, which the prefill
    emits, belongs to none."""
    drafted: list[int]
    """Drafted nodes of each new round."""
    accepted_at_depth: list[int]
    """Rounds of the request so far that accepted a draft at depth d + 1, before cutting."""
    log_probs: list[TokenLogProbs] | None
    """One entry a new token; None below `SamplingMode.FULL`, or if they were not wanted."""


@dataclasses.dataclass(frozen=True)
class ReportLayout:
    """How `Report.packed` is read: generation, finish, length, number of new tokens; D counts of acceptance; W codes."""

    depth: int
    """D."""
    tokens: int
    """W."""
    drafted: tuple[int, ...]
    """Drafted nodes of a round of each shape."""

    def unpack(self, report: Report, slots: Mapping[int, bool] | None = None) -> dict[int, SlotReport]:
        """Waits for a report and reads it, by slot; `slots` are the wanted ones (None: all) and whether log-probabilities are."""
        host = jax.device_get(report)
        if slots is None:
            slots = dict.fromkeys(range(len(host.packed)), True)
        head = 4 + self.depth
        ids, tags = np.divmod(host.packed[:, head:], TAGS)
        heads = host.packed[:, :head].tolist()
        found = {}
        for slot, wants_log_probs in slots.items():
            generation, finish, length, count, *accepted_at_depth = heads[slot]
            shapes = tags[slot, :count].tolist()
            begins = [place for place, tag in enumerate(shapes) if tag]
            log_probs = host.log_probs if wants_log_probs else None
            found[slot] = SlotReport(
                generation=generation,
                finish=finish,
                length=length,
                token_ids=ids[slot, :count].tolist(),
                round_lengths=[end - begin for begin, end in itertools.pairwise([*begins, count])],
                drafted=[self.drafted[shapes[place] - 1] for place in begins],
                accepted_at_depth=accepted_at_depth,
                log_probs=None if log_probs is None else [_at(log_probs, slot, place) for place in range(count)],
            )
        return found


def _at(log_probs: LogProbs, slot: int, place: int) -> TokenLogProbs:
    ids, values = log_probs.top_ids[slot, place].tolist(), log_probs.top[slot, place].tolist()
    return TokenLogProbs(
        float(log_probs.chosen[slot, place]), int(log_probs.ranks[slot, place]), list(zip(ids, values, strict=True))
    )
