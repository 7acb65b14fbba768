"""Text, ids and statistics are cut at the first stop string, wherever rounds and tokens begin and end."""

import itertools

import pytest
import tokenizers
from support.letters import FIRST_PIECE, PIECES, letters_tokenizer
from support.pairs import PROMPTS, completions, decoder_of

from eagle_jax import SamplingParams, TreeConfig, generate
from eagle_jax.decoding.report import SlotReport
from eagle_jax.engine.outputs import OutputProcessor, cut_rounds
from eagle_jax.engine.programs import Programs
from eagle_jax.engine.request import Request
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


def started(tokenizer=TOKENIZER, **params):
    """A processor with one output that streams."""
    processor = OutputProcessor(tokenizer, max_depth=4)
    params = SamplingParams(max_tokens=None, **params)
    processor.add(
        Request(
            request_id="a", prompt_token_ids=[1], max_new_tokens=99, params=params, eos_token_ids=(EOS,), streaming=True
        )
    )
    return processor


def report(ids, rounds=(), earlier=()):
    """What a dispatch says that emitted these ids in these rounds."""
    at_depth = [sum(length > depth for length in (*earlier, *rounds)) for depth in range(1, 5)]
    return SlotReport(1, 0, 0, list(ids), list(rounds), [4] * len(rounds), at_depth, None)


def play(ids, sizes, *, stopped=False, rounds=None, tokenizer=TOKENIZER, **params):
    """Feeds an output to the processor in dispatches of at least these sizes (again and again), as the engine would.

    Args:
      ids: of the output; the first belongs to no round.
      sizes: tokens of a dispatch, up to the end of a round.
      stopped: whether the last id is a stop id.
      rounds: accepted length of each round; one token a round if None.
    """
    processor = started(tokenizer, **params)
    rounds = [1] * (len(ids) - 1) if rounds is None else rounds
    deltas, start, first = [], 0, 0
    for size in itertools.cycle(sizes):
        end, last = start + (start == 0), first
        while last < len(rounds) and end < start + size:
            end, last = end + rounds[last], last + 1
        new = report(ids[start:end], rounds[first:last], rounds[:first])
        delta = processor.process("a", new, finished=end == len(ids), stopped=stopped and end == len(ids))
        deltas += [] if delta is None else [delta]
        start, first = end, last
        if "a" not in processor:
            break
    [result] = completions([deltas[-1].output])
    assert "".join(delta.text for delta in deltas) == result.text
    assert [id_ for delta in deltas for id_ in delta.token_ids] == result.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [result.finish_reason]
    assert deltas[-1].metrics is result.metrics
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


def test_stop_string_before_the_end_of_sequence_wins_and_after_it_does_not_count():
    ids = [token("k"), token("a"), token("b"), EOS]
    early = play(ids, (10,), stopped=True, stop=["a"])
    assert (early.token_ids, early.text, early.stop_reason) == (ids[:2], "k", "a")
    last = play(ids, (1,), stopped=True, stop=["b"])
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
def test_text_that_comes_out_later_than_its_tokens_is_cut_at_the_right_token(size):
    # The bytes of é and 日 make one run, whose text is out only when the run has ended: ids must wait for it.
    tokenizer = sentencepiece_tokenizer()
    ids = [1, *(3 + byte for byte in "é日".encode()), 2, 1, 2]
    assert tokenizer.decode(ids) == "aé日b ab"
    for stop in ("é", "aé", "é日", "日b", "b", " a"):
        result = play(ids, (size,), stop=[stop], tokenizer=tokenizer)
        count, kept, _ = one_by_one(ids, [stop], tokenizer=tokenizer)
        assert (result.token_ids, result.text) == (ids[:count], kept), stop


def test_ids_are_not_held_back_without_need():
    ids = [token(t) for t in "kabd"]
    delta = started(stop=["xyz"]).process("a", report(ids, [3]), finished=False, stopped=False)
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
    dispatches = []
    decode = Programs.decode
    monkeypatch.setattr(
        Programs, "decode", lambda *args, **options: (dispatches.append(1), decode(*args, **options))[1]
    )
    options = {"max_new_tokens": 150, "ignore_eos": True, "max_num_seqs": 4}
    [text, *_] = generate(pair[0], [PROMPTS[0]] * 4, **options).texts
    dispatches.clear()
    result = generate(pair[0], [PROMPTS[0]] * 4, stop=text[:2], **options)
    assert set(result.finish_reasons) == {"stop"}
    assert len(dispatches) <= 3, "one for the first token, one with the stop string, and one that was already in flight"


def test_stop_strings_end_plain_and_speculative_output_at_the_same_place(pair):
    target, draft = pair
    plain = generate(target, PROMPTS, max_new_tokens=40, ignore_eos=True, max_num_seqs=4)
    row = 0
    ids, text = plain.token_ids[row], plain.texts[row]
    stops = [text[start : start + size] for start in range(0, len(text) - 6, 3) for size in (1, 3, 6)]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, stop=stop) for stop in stops]
    seen = set()
    for decoder in (decoder_of(target, max_num_seqs=4), decoder_of(target, draft, TreeConfig.chain(4), max_num_seqs=4)):
        outputs, _ = decoder.run(decoder.read([PROMPTS[row]] * len(stops)), params, progress=False)
        results = completions(outputs)
        for stop, result in zip(stops, results, strict=True):
            count, kept, _ = one_by_one(ids, [stop])
            assert (result.token_ids, result.text, result.stop_reason) == (ids[:count], kept, stop)
            assert 1 + sum(result.metrics.accepted_lengths) == count
            seen |= set(result.metrics.accepted_lengths)
    assert max(seen) > 2
    assert target.tokenizer is not None
