"""Data that the target writes: the bulk decoder against `generate`, shards that go on where they were cut, and refusals."""

import argparse
import dataclasses
import json
import types

import numpy as np
import pytest
import runs

from eagle_jax.cli.synthesize import part
from eagle_jax.training.conversations import DataError, encode_conversation, read_shards, write_shard
from eagle_jax.training.overlap import EvaluationSets
from eagle_jax.training.packing import Packer, fit, pack
from eagle_jax.training.prompts import UserTurn, filter_turns
from eagle_jax.training.synthesis import SynthesisConfig, synthesize
from eagle_jax.training.vocabulary import choose_vocabulary


def test_a_prompt_that_overlaps_with_an_evaluation_set_is_refused_by_name(tmp_path):
    long = "Alice has thirteen apples, and gives every one of her four good friends the same number."
    file = tmp_path / "gsm.jsonl"
    file.write_text(json.dumps({"turns": ["Who?"]}) + "\n" + json.dumps({"turns": [long]}) + "\n")
    sets = EvaluationSets([file])
    other = UserTurn(
        "Write about " + long.replace("same", "equal"), "a line 1"
    )  # 12 words in a row, and 13 with "Write"
    shared = UserTurn("Please: " + long.lower(), "prompts.jsonl line 3")
    kept, _ = filter_turns([UserTurn("alice has apples", "x")], sets, drop_overlapping=False, min_words=2, seen=set())
    assert len(kept) == 1
    with pytest.raises(DataError, match=r"prompts\.jsonl line 3 overlaps with the evaluation sample gsm\.jsonl line 2"):
        filter_turns([shared], sets, drop_overlapping=False, min_words=2, seen=set())
    kept, dropped = filter_turns(
        [shared, other, UserTurn("WHO", "y"), UserTurn("So far so good", "z"), UserTurn("so far, so good!", "z2")],
        sets, drop_overlapping=True, min_words=1, seen=set(),
    )  # fmt: skip
    assert [turn.name for turn in kept] == ["z"]
    assert (dropped.overlapping, dropped.duplicates) == (3, 1)


class Template:
    """A tokenizer of characters whose chat template is a function."""

    def __init__(self, forgets: bool = False):
        self.forgets = forgets

    def render_chat(self, messages, add_generation_prompt=True):
        out = ""
        for index, message in enumerate(messages):
            content = message["content"]
            if self.forgets and message["role"] == "assistant" and index + 1 < len(messages):
                content = content[-1:]  # as templates do that leave earlier reasoning out
            out += f"<{message['role'][0]}>{content}#\n"
        return out + ("<a>" if add_generation_prompt else "")

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]


CHAT = [
    {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "So"}, {"role": "assistant", "content": "no"},
]  # fmt: skip


def test_the_mask_marks_every_answer_with_its_end_and_nothing_else():
    found = encode_conversation(Template(), CHAT, eos_ids=[ord("#")], name="x")
    text = "".join(map(chr, found.tokens))
    assert text == "<u>Hi#\n<a>yes#\n<u>So#\n<a>no#\n"
    marked = "".join(c if keep else "." for c, keep in zip(text, found.assistant, strict=True))
    assert marked == "..........yes#...........no#."


def test_a_template_that_does_not_match_is_an_error_that_names_the_sample():
    with pytest.raises(DataError, match="chats line 4: the chat template does not match: with message 3 it writes 's#"):
        encode_conversation(Template(forgets=True), CHAT, eos_ids=[ord("#")], name="chats line 4")
    with pytest.raises(DataError, match=r"chats line 5: no message has the role 'assistant'; the roles are \['user'\]"):
        encode_conversation(Template(), CHAT[:1], eos_ids=[], name="chats line 5")


class Numbers:
    """A tokenizer of numbers below 90, each a word; the template puts 91 before a turn, 92 behind it and 93 before an answer."""

    chat_template = "turn"

    def __init__(self):
        self.backend = self

    def render_chat(self, messages, add_generation_prompt=True):
        return f"91 {messages[0]['content']} 92 93"

    def encode(self, text, add_special_tokens=True):
        return [int(word) for word in text.split()]

    def encode_batch(self, texts, add_special_tokens):
        return [types.SimpleNamespace(ids=self.encode(text)) for text in texts]

    def decode(self, ids):
        return " ".join(str(id_) for id_ in ids if id_ < 90)


def test_synthesis_goes_on_where_it_was_cut_and_writes_the_same(tmp_path):
    tiny = runs.target()
    ends = dataclasses.replace(tiny.config, eos_token_ids=(95, 96))  # or no invented turn would come to its end
    target = dataclasses.replace(tiny, tokenizer=Numbers(), config=ends)
    rng = np.random.default_rng(1)
    file = tmp_path / "prompts.jsonl"
    texts = [" ".join(map(str, rng.integers(0, 90, rng.integers(2, 12)))) for _ in range(9)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in [*texts, texts[0]]))
    config = SynthesisConfig(
        invent=40, max_invented_tokens=12, max_prompt_tokens=14, max_new_tokens=10, temperatures=((0, 1), (0.9, 1)),
        min_prompt_words=1,
    )  # fmt: skip
    options = {"prompts": [file], "slots": 4, "shard_size": 3, "say": runs.silent}
    whole = synthesize(target, tmp_path / "whole", config, **options)
    assert whole.remaining == 0
    assert whole.conversations >= 9
    calls = 0
    while True:
        result = synthesize(target, tmp_path / "parts", config, max_seconds=0, **options)
        calls += 1
        if not result.remaining:
            break
    assert calls > 1
    assert (result.conversations, result.tokens) == (whole.conversations, whole.tokens)

    def rows(folder):
        return sorted((c.tokens.tolist(), c.assistant.tolist(), c.temperature) for c in read_shards(folder))

    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert {heat for *_, heat in rows(tmp_path / "whole")} == {0.0, float(np.float32(0.9))}
    shares = [tmp_path / f"share{i}" for i in range(2)]
    for i, folder in enumerate(shares):
        synthesize(target, folder, dataclasses.replace(config, part=(i, 2)), **options)
    assert sorted(rows(shares[0]) + rows(shares[1])) == rows(tmp_path / "whole")

    def invented(folder):
        return [json.loads(line) for line in (folder / "invented.jsonl").open()]

    assert all(row["number"] % 2 == i for i, folder in enumerate(shares) for row in invented(folder))
    both = sorted(invented(shares[0]) + invented(shares[1]), key=lambda row: row["number"])
    assert both == invented(tmp_path / "whole")
    assert len(both) >= 2
    assert min(len(rows(folder)) for folder in shares) >= 4
    with pytest.raises(DataError, match="begun with another max_new_tokens: 10, not 9"):
        synthesize(target, tmp_path / "parts", dataclasses.replace(config, max_new_tokens=9), **options)
    evaluation = tmp_path / "evaluation.jsonl"
    evaluation.write_text(json.dumps({"turns": [texts[4]]}) + "\n")
    with pytest.raises(
        DataError, match=r"prompts\.jsonl line 5 overlaps with the evaluation sample evaluation\.jsonl line 1"
    ):
        synthesize(target, tmp_path / "other", config, evaluation=[evaluation], **options)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2"])
def test_a_part_that_there_is_not_is_refused(text):
    assert part("2/2") == (1, 2)
    with pytest.raises(argparse.ArgumentTypeError, match="is not I/N with I from 1 to N"):
        part(text)


def test_shards_give_back_what_was_written(tmp_path):
    conversation = runs.conversation()
    write_shard(tmp_path / "shard-00000.npz", [conversation, conversation], index=np.array([3, 1]))
    first, second = read_shards(tmp_path)
    np.testing.assert_array_equal(first.tokens, conversation.tokens)
    np.testing.assert_array_equal(second.assistant, conversation.assistant)
    assert (first.temperature, second.name) == (0.0, "shard-00000.npz row 1")


def test_batches_hold_every_conversation_once_an_epoch_and_follow_from_their_number():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 30, 50)
    rows = pack(lengths, 32)
    assert sorted(i for row in rows for i in row) == list(range(50))
    assert all(sum(lengths[i] for i in row) <= 32 for row in rows)
    base = runs.conversation()
    conversations, cut, lost = fit(
        [type(base)(np.full(n, i, np.int32), np.arange(n) > 0, str(i), 0.0) for i, n in enumerate([*lengths, 40, 2])],
        32,
    )
    assert (cut, lost) == (1, sum(n < 3 for n in [*lengths, 2]))
    packer = Packer(conversations, 32, 4, seed=1)
    batches = packer.batches()
    epoch = [next(batches) for _ in range(packer.batches_per_epoch())]
    seen = np.concatenate([np.unique(b.tokens[b.segments > 0]) for b in epoch])
    assert set(seen) == {int(c.tokens[0]) for c in conversations}
    again = next(packer.batches(3))
    np.testing.assert_array_equal(again.tokens, epoch[3].tokens)
    starts = np.diff(epoch[0].segments, prepend=0) > 0
    assert (epoch[0].positions[starts] == 0).all()


def test_the_draft_vocabulary_is_what_was_written_most_filled_up_in_order():
    ids, coverage = choose_vocabulary(np.array([0, 5, 0, 9, 1, 0, 5]), 3)
    assert ids.tolist() == [1, 3, 6]
    assert coverage == 19 / 20
    ids, coverage = choose_vocabulary(np.array([0, 5, 0, 9, 1, 0, 5]), 6)
    assert (ids.tolist(), coverage) == ([0, 1, 2, 3, 4, 6], 1.0)
    with pytest.raises(ValueError, match="no token was counted"):
        choose_vocabulary(np.zeros(5, int), 2)
