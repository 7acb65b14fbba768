"""Traced rounds against recorded rounds of the PyTorch reference, and their picture."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support import golden

from eagle_jax.evaluation import TracedRound, trace_rounds, tree_svg

ASSETS = Path(__file__).resolve().parents[2] / "docs" / "assets"
SAFE_GAP = 2e-5


@pytest.fixture(scope="module")
def recorded() -> TracedRound:
    return TracedRound(**json.loads((ASSETS / "worked_tree.json").read_text(encoding="utf-8")))


def test_rounds_are_those_of_the_reference() -> None:
    trace = next(t for t in golden.traces() if t.name == "greedy_A_e3_t6d4k1_p3")
    target, draft = golden.target("target_A"), golden.draft("head_A_e3", "target_A")
    _, _, tree = trace.group
    wanted = trace.rounds[:6]
    got = trace_rounds(target, draft, {"prompt_token_ids": trace.prompt}, rounds=len(wanted), tree=tree)
    assert max(traced.accepted_length for traced in got) > 1
    for traced, record in zip(got, wanted, strict=True):
        assert min(record["min_beam_gap"], record["final_selection_gap"]) > SAFE_GAP
        assert traced.tokens == record["draft_tokens"]
        assert traced.parents == record["parents"]
        assert traced.depths == record["tree_position_ids"]
        assert traced.accepted == record["accepted_nodes"]
        assert traced.accepted_length == record["accept_length"] + 1
        assert traced.bonus == record["next_root"]
        assert traced.texts is None
    with pytest.raises(ValueError, match="rounds must be an integer of at least 1, got 0"):
        trace_rounds(target, draft, [1, 2], rounds=0, tree=tree)
    with pytest.raises(ValueError, match="rounds of one prompt are traced, got 2 prompts"):
        trace_rounds(target, draft, [[1, 2], [3]], rounds=1, tree=tree)


def test_the_recorded_round_is_a_round(recorded: TracedRound) -> None:
    """The one that docs/concepts.md describes."""
    for node in recorded.accepted[1:]:
        assert recorded.tokens[node] == recorded.choices[recorded.parents[node]]
    assert recorded.bonus == recorded.choices[recorded.accepted[-1]]
    assert not [
        n for n, p in enumerate(recorded.parents) if p == recorded.accepted[-1] and recorded.tokens[n] == recorded.bonus
    ]
    assert len(recorded.tokens) == 10
    assert recorded.accepted_length == 4
    text = (ASSETS.parent / "concepts.md").read_text(encoding="utf-8")
    assert recorded.texts is not None
    assert f'"{recorded.texts[0]}" is its bonus token' in text


def test_the_picture_in_the_docs_is_that_of_the_recorded_round(recorded: TracedRound) -> None:
    svg = tree_svg(recorded)
    assert (ASSETS / "worked_tree.svg").read_text(encoding="utf-8") == svg
    root = ET.fromstring(svg)
    boxes = [e.get("class") for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("class")]
    assert sorted(boxes) == sorted(["root", *["accepted"] * 3, *["box"] * 6, "bonus"])
    ways = [e for e in root.iter("{http://www.w3.org/2000/svg}path") if e.get("class") == "way"]
    assert len(ways) == 4


def test_a_picture_holds_tokens_that_are_markup_and_models_without_text(recorded: TracedRound) -> None:
    assert recorded.texts is not None
    odd = ["<b>&", "\n", "a very long token indeed", *recorded.texts[3:]]
    shown = [e.text or "" for e in ET.fromstring(tree_svg(dataclasses.replace(recorded, texts=odd))).iter()]
    assert {"<b>&", "\\n"} <= set(shown)
    assert max(len(t) for t in shown if "very" in t) == 12
    ids = tree_svg(dataclasses.replace(recorded, texts=None, bonus_text=None))
    assert re.search(rf">{recorded.tokens[1]}<", ids)
