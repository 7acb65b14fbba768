"""`eagle-jax sweep`: many shapes, a table, a picture and a recommendation."""

import json

import pytest

from eagle_jax.cli.sweep import DEFAULT_TREES, TREES, grid


@pytest.fixture
def arguments(chat_model, head, tmp_path) -> tuple[str, ...]:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"turns": ["the fox"]}\n{"turns": ["lazy dog"]}\n')
    return (
        "sweep",
        "--model-dir",
        chat_model,
        "--eagle-dir",
        head,
        "--dataset-path",
        str(file),
        "--output-len",
        "12",
        "--ignore-eos",
    )


def test_every_shape_is_measured_against_plain_decoding_and_one_is_recommended(command, arguments, tmp_path):
    shapes = ("--num-spec-tokens", "3", "--total-tokens", "8", "--depth", "2", "--tree-top-k", "3")
    code, out, _ = command(*arguments, *shapes, "--output", str(tmp_path / "out"))
    assert code == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [entry["name"] for entry in report["configurations"]] == ["plain, T=0", "chain 3, T=0", "tree 8/2/3, T=0"]
    speeds = {entry["name"]: entry["total"]["tokens_per_second"] for entry in report["configurations"]}
    [recommendation] = report["recommendations"]
    assert recommendation["configuration"] == max(speeds, key=speeds.get)
    assert recommendation["text"] in out
    assert f"eagle-jax generate ... {recommendation['option']}" in out
    assert {
        "plain, T=0": "--no-draft",
        "chain 3, T=0": "--num-speculative-tokens 3",
        "tree 8/2/3, T=0": "--tree 8,2,3",
    }[recommendation["configuration"]] == recommendation["option"]
    assert (tmp_path / "out" / "speed.png").is_file()


def test_the_grid_holds_the_trees_that_can_be_and_no_others():
    found = grid((4, 8, 100), (2, 7), (2, 3))
    assert [(tree.total_tokens, tree.depth, tree.top_k) for tree in found] == [
        (4, 2, 2),
        (4, 2, 3),
        (8, 2, 2),
        (8, 2, 3),
    ]
    for sizes in (*TREES.values(), DEFAULT_TREES):
        assert len(grid(*sizes)) >= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--depth", "3"), "trees have three sizes: --depth need --total-tokens and --tree-top-k as well"),
        (("--total-tokens", "100", "--depth", "1", "--tree-top-k", "2"), "no combination of --total-tokens"),
        (("--total-tokens", "8", "--depth", "2", "--tree-top-k", "900"), "--tree-top-k 900 exceeds the 256 tokens"),
    ],
)
def test_shapes_that_cannot_be_are_errors(command, arguments, options, message):
    code, _, err = command(*arguments, *options)
    assert code == 2
    assert message in err
