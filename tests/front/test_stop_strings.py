"""Text, ids and statistics are cut at the first stop string, wherever rounds and tokens begin and end."""

import itertools

import pytest
import tokenizers
from letters import FIRST_PIECE, PIECES, letters_tokenizer
from pairs import PROMPTS

from eagle_jax import SamplingParams, TreeConfig, generate
from eagle_jax.decoding.engine import Completion, Update
from eagle_jax.front.engines import TimedEngine
from eagle_jax.front.prompts import Prompt
from eagle_jax.front.rows import OutputRow, cut_rounds
from eagle_jax.front.runner import Runner
from eagle_jax.text import Tokenizer

TOKENIZER = letters_tokenizer()
EOS = 2


def token(text):
    """The id of a piece of text or of some bytes."""
    if isinstance(text, bytes):
        return FIRST_PIECE + PIECES.index(text)
    return next(i for i in range(512) if TOKENIZER.decode([i]) == text)


def one_by_one(ids, stops, include=False, tokenizer=TOKENIZER):
    """Number of tokens, text and stop string when the text is looked at after every token."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            end, length, stop = min(found)
            return count, text[: end if include else end + length], stop
    return len(ids), tokenizer.decode(ids), None


def play(ids, sizes, *, late=False, stopped=False, rounds=None, tokenizer=TOKENIZER, **params):
    """Feeds an output to a row in dispatches of these sizes (again and again), as the engine would.

    Args:
      late: the completion comes in an update of its own, with tokens of a dispatch that was already in flight.
      stopped: the last id is a stop id.
      rounds: accepted length of each round; one token a round if None.
    """
    settings = SamplingParams(max_tokens=None, **params)
    prompt = Prompt(text=None, token_ids=[1])
    row = OutputRow(0, prompt, settings, tokenizer=tokenizer, eos_ids=(EOS,), streaming=True)
    rounds = [1] * (len(ids) - 1) if rounds is None else rounds
    updates, start = [], 0
    for size in itertools.cycle(sizes):
        if start >= len(ids):
            break
        updates.append(ids[start : start + size])
        start += size
    if late:
        updates.append([])
    deltas, emitted, aborted = [], 0, False
    for number, new in enumerate(updates):
        emitted += len(new)
        completion = None
        last = number == len(updates) - 1
        if last or aborted:
            kept, at_depth = cut_rounds(rounds, [sum(r > d for r in rounds) for d in range(1, 5)], emitted)
            completion = Completion(
                token_ids=ids[:emitted],
                stopped=stopped and last,
                accepted_lengths=kept,
                accepted_at_depth=at_depth,
                drafted=[4] * len(kept),
            )
        delta = row.add(Update(index=0, token_ids=new, completion=completion))
        if delta is not None:
            deltas.append(delta)
        if completion is not None:
            break
        aborted = aborted or row.must_abort
    result = row.result
    assert "".join(delta.text for delta in deltas) == result.text
    assert [id_ for delta in deltas for id_ in delta.token_ids] == result.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [result.finish_reason]
    assert deltas[-1].metrics is result.metrics
    assert 1 + sum(result.metrics.accepted_lengths) == len(result.token_ids)
    return result


WORDS = [token(t) for t in ("ba", "bark", "ka", " ", "kan", "d", "o", "bo日", "baé", "e", "n")]


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (5,), (100,)])
@pytest.mark.parametrize("include", [False, True])
def test_every_stop_string_of_a_text_is_found_where_it_is_completed(sizes, include):
    ids = WORDS
    text = TOKENIZER.decode(ids)
    assert "日" in text
    rounds = [3, 1, 4, 2]
    assert 1 + sum(rounds) == len(ids)
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            stop = text[start:end]
            count, kept, _ = one_by_one(ids, [stop], include)
            result = play(ids, sizes, stop=[stop], include_stop_str_in_output=include, rounds=rounds)
            assert (result.token_ids, result.text) == (ids[:count], kept), stop
            assert (result.finish_reason, result.stop_reason) == ("stop", stop)


def test_the_stop_string_completed_first_wins():
    ids = [token(t) for t in ("k", "a", "b", "d", "e", "f")]
    for stops in (["kabde", "bd"], ["bd", "kabde"], ["de", "d"], ["abd", "bd", "d"]):
        count, kept, stop = one_by_one(ids, stops)
        result = play(ids, (4,), stop=stops)
        assert (result.token_ids, result.text, result.stop_reason) == (ids[:count], kept, stop), stops


@pytest.mark.parametrize("late", [False, True])
def test_stop_string_before_the_end_of_sequence_wins_and_after_it_does_not_count(late):
    ids = [token("k"), token("a"), token("b"), EOS]
    early = play(ids, (10,), late=False, stopped=True, stop=["a"])
    assert (early.token_ids, early.text, early.stop_reason) == (ids[:2], "k", "a")
    last = play(ids, (1,), late=late, stopped=not late, stop=["b"])
    assert (last.token_ids, last.text, last.stop_reason) == (ids[:3], "ka", "b")
    none = play(ids, (2,), stopped=True, stop=["x"])
    assert (none.token_ids, none.text, none.finish_reason, none.stop_reason) == (ids, "kab", "stop", None)


def test_stop_string_that_only_begins_is_text():
    ids = [token(t) for t in ("k", "a", "b")]
    result = play(ids, (1,), stop=["abc"])
    assert (result.text, result.finish_reason, result.stop_reason) == ("kab", "length", None)


def test_tokens_behind_the_stop_string_that_were_in_flight_leave_no_trace():
    ids = [token(t) for t in "kabdefgh"]
    result = play(ids, (3, 2, 3), rounds=[2, 2, 3], stop=["b"])
    assert (result.token_ids, result.text) == (ids[:3], "ka")
    assert result.metrics.accepted_lengths == [2]
    assert result.metrics.accepted_at_depth == [1, 0, 0, 0]
    assert result.metrics.drafted == 4


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,)])
def test_characters_are_never_split(sizes):
    # 日 in two ways, é, a broken character, 😀, and a character that never gets complete
    ids = [
        token(p)
        for p in (
            b"\xe6",
            b"\x97\xa5",
            b"\xe6\x97",
            b"\xa5!",
            b"\xc3",
            b"\xa9",
            b"\xff",
            b"\xf0\x9f",
            b"\x98\x80",
            b"z\xc3",
        )
    ]
    result = play(ids, sizes)
    assert result.text == TOKENIZER.decode(ids) == "日日!é\ufffd😀z\ufffd"
    for stop in ("日!", "é", "!é", "😀", "😀z"):
        count, kept, _ = one_by_one(ids, [stop])
        result = play(ids, sizes, stop=[stop])
        assert (result.token_ids, result.text) == (ids[:count], kept), stop


def sentencepiece_tokenizer():
    """Three pieces, and bytes that are decoded run by run."""
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend)


@pytest.mark.parametrize("size", [1, 2, 3, 20])
@pytest.mark.parametrize("late", [False, True])
def test_text_that_comes_out_later_than_its_tokens_is_cut_at_the_right_token(size, late):
    # The bytes of é and 日 make one run, whose text is out only when the run has ended: ids must wait for it.
    tokenizer = sentencepiece_tokenizer()
    ids = [1, *(3 + byte for byte in "é日".encode()), 2, 1, 2]
    assert tokenizer.decode(ids) == "aé日b ab"
    for stop in ("é", "aé", "é日", "日b", "b", " a"):
        result = play(ids, (size,), late=late, stop=[stop], tokenizer=tokenizer)
        count, kept, _ = one_by_one(ids, [stop], tokenizer=tokenizer)
        assert (result.token_ids, result.text) == (ids[:count], kept), stop


def test_ids_are_not_held_back_without_need():
    ids = [token(t) for t in "kabd"]
    row = OutputRow(
        0,
        Prompt(text=None, token_ids=[1]),
        SamplingParams(stop=["xyz"]),
        tokenizer=TOKENIZER,
        eos_ids=(),
        streaming=True,
    )
    delta = row.add(Update(index=0, token_ids=ids, completion=None))
    assert (delta.text, delta.token_ids) == ("kabd", ids)


def test_statistics_are_cut_with_the_tokens():
    lengths, at_depth = [3, 1, 4], [2, 2, 1]
    assert cut_rounds(lengths, at_depth, 1) == ([], [0, 0, 0])
    assert cut_rounds(lengths, at_depth, 2) == ([1], [1, 1, 0])
    assert cut_rounds(lengths, at_depth, 4) == ([3], [1, 1, 0])
    assert cut_rounds(lengths, at_depth, 5) == ([3, 1], [1, 1, 0])
    assert cut_rounds(lengths, at_depth, 6) == ([3, 1, 1], at_depth)
    assert cut_rounds(lengths, at_depth, 9) == (lengths, at_depth)
    # The engine cut the last round to 4; before cutting it had accepted all 4 drafts of a tree.
    assert cut_rounds(lengths, [3, 2, 2], 8) == ([3, 1, 3], [3, 2, 2])


def test_work_ends_soon_after_a_stop_string(pair, monkeypatch):
    aborted, rounds = [], []
    abort = TimedEngine.abort
    monkeypatch.setattr(TimedEngine, "abort", lambda engine, index: (aborted.append(index), abort(engine, index)))
    read = TimedEngine._read
    monkeypatch.setattr(TimedEngine, "_read", lambda *args: (rounds.append(1), read(*args))[1])
    options = {"max_new_tokens": 150, "ignore_eos": True, "max_num_seqs": 4}
    [text, *_] = generate(pair[0], [PROMPTS[0]] * 4, **options).texts
    rounds.clear()
    result = generate(pair[0], [PROMPTS[0]] * 4, stop=text[:2], **options)
    assert set(result.finish_reasons) == {"stop"}
    assert set(aborted) == {0, 1, 2, 3}
    assert len(rounds) <= 3, "one dispatch with the stop string, and one that was already in flight"


def test_stop_strings_end_plain_and_speculative_output_at_the_same_place(pair):
    target, draft = pair
    plain = generate(target, PROMPTS, max_new_tokens=40, ignore_eos=True, max_num_seqs=4)
    row = 0
    ids, text = plain.token_ids[row], plain.texts[row]
    stops = [text[start : start + size] for start in range(0, len(text) - 6, 3) for size in (1, 3, 6)]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, stop=stop) for stop in stops]
    seen = set()
    for runner in (Runner(target, max_num_seqs=4), Runner(target, draft, TreeConfig.chain(4), max_num_seqs=4)):
        results, _ = runner.run(runner.read([PROMPTS[row]] * len(stops)), params, progress=False)
        for stop, result in zip(stops, results, strict=True):
            count, kept, _ = one_by_one(ids, [stop])
            assert (result.token_ids, result.text, result.stop_reason) == (ids[:count], kept, stop)
            assert 1 + sum(result.metrics.accepted_lengths) == count
            seen |= set(result.metrics.accepted_lengths)
    assert max(seen) > 2
    assert target.tokenizer is not None
