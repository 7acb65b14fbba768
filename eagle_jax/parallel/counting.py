"""Collectives of a compiled program, counted from its text in XLA's own language (HLO)."""

import collections
import dataclasses
import re
from collections.abc import Mapping

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
PARTS = ("draft", "verify", "accept", "commit")
"""Named scopes of a round (`eagle_jax.decoding.loop.decode_round`)."""

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*)$")
_OPCODE = re.compile(r"(?:^|[\s)}\]])([a-z][a-z0-9\-]*)\(")
_CALLED = re.compile(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_BOUND = re.compile(r"^\s+ROOT %?[\w.\-]+ = pred\[\]\S* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT")
_SCOPE = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass
class _Computation:
    """What one computation does itself, and which others it runs, how often."""

    own: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    runs: list[tuple[tuple[str, ...], int | str]] = dataclasses.field(default_factory=list)
    """Computations of which the one with the most collectives counts, and the times it is run: a number, or the computation that
    says whether to go on."""
    constants: dict[str, int] = dataclasses.field(default_factory=dict)
    bound: int | None = None
    """If it says whether a counter is below a constant: that constant."""


def count_collectives(text: str) -> dict[str, dict[str, int]]:
    """How many collectives of each kind one run of a program executes, by the part of a round that asks for them.

    Loops of known length count as often as they run, others once, so that the loop over rounds counts as one round; of the
    branches of a condition the one with the most counts.

    Args:
      text: of a compiled program (`jax.stages.Compiled.as_text`).

    Returns:
      Numbers by part ("draft", "verify", "accept", "commit", or "other") and kind ("all-reduce", ...).
    """
    computations, entry = _parse(text)
    known: dict[str, collections.Counter[tuple[str, str]]] = {}

    def total(name: str) -> collections.Counter[tuple[str, str]]:
        if name not in known:
            known[name] = collections.Counter()  # computations do not call themselves
            found = collections.Counter(computations[name].own)
            for names, times in computations[name].runs:
                branches = [total(branch) for branch in names if branch in computations]
                most = max(branches, key=lambda counter: counter.total(), default=collections.Counter())
                if isinstance(times, str):
                    times = computations[times].bound or 1 if times in computations else 1
                found.update({key: times * count for key, count in most.items()})
            known[name] = found
        return known[name]

    out: dict[str, dict[str, int]] = {}
    for (part, kind), count in sorted(total(entry).items()):
        out.setdefault(part, {})[kind] = count
    return out


def total_of(counts: Mapping[str, Mapping[str, int]], *parts: str) -> int:
    """Collectives of some parts together, of all if none is named."""
    return sum(sum(kinds.values()) for part, kinds in counts.items() if not parts or part in parts)


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[1]] = _Computation()
            if line.startswith("ENTRY"):
                entry = header[1]
        elif current is not None and (instruction := _INSTRUCTION.match(line)):
            if constant := _CONSTANT.match(line):
                current.constants[constant[1]] = int(constant[2])
            if bound := _BOUND.match(line):
                current.bound = current.constants.get(bound[1])
            _note(current, instruction[1])
    if not entry:
        raise ValueError("text has no ENTRY computation: it is not that of a compiled program")
    return computations, entry


def _note(computation: _Computation, instruction: str) -> None:
    opcode = _OPCODE.search(instruction)
    if opcode is None:
        return
    kind = opcode[1].removesuffix("-start")
    if kind in COLLECTIVES:
        scope = _SCOPE.search(instruction)
        path = scope[1].split("/") if scope else []
        part = next((part for part in path if part in PARTS), "other")
        computation.own[part, kind] += 1
        return
    times: int | str = 1
    if opcode[1] == "while":
        # XLA writes the number of turns down where it knows it; for TPUs it is left in the condition of `lax.scan`.
        trips, condition = _TRIPS.search(instruction), _CONDITION.search(instruction)
        times = int(trips[1]) if trips else condition[1] if condition else 1
    if opcode[1] == "conditional":
        names = [name.strip().lstrip("%") for found in _BRANCHES.findall(instruction) for name in found.split(",")]
        computation.runs.append((tuple(names + _CALLED.findall(instruction)), 1))
        return
    computation.runs += [((name,), times) for name in _CALLED.findall(instruction)]
    for found in _BRANCHES.findall(instruction):
        computation.runs += [((name.strip().lstrip("%"),), times) for name in found.split(",")]
