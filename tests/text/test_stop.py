import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax.text import StopMatch, StopStringFinder, StreamingDetokenizer, tokens_until


def feed(stops, deltas):
    """The last result, and the text that a caller would have shown."""
    finder = StopStringFinder(stops)
    text, shown = "", ""
    for delta in deltas:
        text += delta
        result = finder.push(delta)
        assert result.safe_end >= len(shown), "text was shown that should have been held back"
        shown = text[: result.safe_end]
    result = finder.finish()
    assert result.safe_end >= len(shown)
    return result, text[: result.safe_end]


def first_by_characters(stops, text):
    """The definition: one character at a time, stop as soon as the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            longest = max(ends, key=len)
            return StopMatch(longest, end - len(longest), end)
    return None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_result_is_that_of_single_characters_for_every_split(text, stops, cuts):
    cuts = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    deltas = [text[start:end] for start, end in itertools.pairwise(cuts)]
    expected = first_by_characters(stops, text)
    result, shown = feed(stops, deltas)
    assert result.match == expected
    assert shown == (text if expected is None else text[: expected.start])


@pytest.mark.parametrize("offset", range(12))
@pytest.mark.parametrize("cut", range(13))
def test_stop_string_at_every_offset_over_two_pushes(offset, cut):
    text = "." * offset + "STOP" + "." * (12 - offset)
    result, shown = feed(["STOP"], [text[:cut], text[cut:]])
    assert result.match == StopMatch("STOP", offset, offset + 4)
    assert shown == "." * offset


def test_possible_start_is_held_back_and_let_go():
    finder = StopStringFinder(["<end>"])
    assert finder.push("a<e").safe_end == 1
    assert finder.push("n").safe_end == 1
    assert finder.push("t").safe_end == 5
    assert finder.push("<").safe_end == 5
    assert finder.finish().safe_end == 6


def test_earliest_of_several_wins_whatever_their_order():
    for stops in (["two", "one"], ["one", "two"]):
        result, shown = feed(stops, ["zero one two"])
        assert result.match == StopMatch("one", 5, 8)
        assert shown == "zero "


def test_nothing_changes_after_a_match():
    finder = StopStringFinder(["x"])
    found = finder.push("abxcd")
    assert (found.safe_end, found.match) == (2, StopMatch("x", 2, 3))
    assert finder.push("x") == finder.finish() == found


def test_no_stops_makes_all_text_safe():
    result, shown = feed([], ["abc", "", "d"])
    assert result.match is None
    assert shown == "abcd"


@pytest.mark.parametrize(
    ("stops", "error", "message"),
    [
        ("STOP", TypeError, r"stops must be a sequence of str, got one str; pass \['STOP'\]"),
        (["a", ""], ValueError, r"stops\[1\] is empty"),
        (["a", 3], TypeError, r"stops\[1\] must be a str, got int"),
    ],
)
def test_wrong_stops_are_refused(stops, error, message):
    with pytest.raises(error, match=message):
        StopStringFinder(stops)


def brute_force(tokenizer, ids, text_end, skip):
    kept = tokenizer.decode(ids, skip)[:text_end]
    return next(n for n in range(len(ids) + 1) if tokenizer.decode(ids[:n], skip).startswith(kept))


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_tokens_until_is_the_smallest_prefix(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=16))
    skip = data.draw(st.booleans())
    text_end = data.draw(st.integers(0, len(tokenizer.decode(ids, skip))))
    assert tokens_until(tokenizer, ids, text_end, skip) == brute_force(tokenizer, ids, text_end, skip)


@pytest.mark.parametrize(
    "text", ["the quick brown fox jumps over the lazy dog", "a 😀 the 日本語 and é.", "  the  and"]
)
def test_ids_and_text_are_cut_at_the_same_place(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    for start in range(len(text)):
        for end in range(start + 1, min(start + 8, len(text)) + 1):
            detokenizer, finder = StreamingDetokenizer(tokenizer), StopStringFinder([text[start:end]])
            deltas = [detokenizer.push([id_]) for id_ in ids] + [detokenizer.finish()]
            results = [finder.push(delta) for delta in deltas]
            match = results[-1].match
            assert match is not None
            assert text[match.start : match.end] == text[start:end]
            count = tokens_until(tokenizer, ids, match.end)
            assert tokenizer.decode(ids[:count]).startswith(text[: match.end])
            assert not tokenizer.decode(ids[: count - 1]).startswith(text[: match.end])


def test_stop_inside_one_token(byte_level):
    ids = byte_level.encode("the quick", add_special_tokens=False)
    texts = [byte_level.decode([id_]) for id_ in ids]
    assert len(texts[0]) == 3  # "the" is one token, and "h" lies inside it
    assert tokens_until(byte_level, ids, 2) == 1
    assert tokens_until(byte_level, ids, 0) == 0


def test_broken_character_at_the_cut_belongs_to_its_own_token(byte_level):
    # The first lead byte is known to be broken when the second comes, which is itself still open.
    lead = byte_level.backend.token_to_id("â")  # the byte 0xE2
    letter = byte_level.backend.token_to_id("z")
    assert byte_level.decode([lead, lead, letter]) == "\ufffd\ufffdz"
    for ids in ([lead, lead], [lead, lead, letter]):
        assert [tokens_until(byte_level, ids, end) for end in (1, 2)] == [1, 2]


def test_character_at_the_cut_ends_with_its_last_byte_token(sentencepiece):
    ids = sentencepiece.encode("a😀a", add_special_tokens=False)  # "▁a", four bytes, "a"
    assert [tokens_until(sentencepiece, ids, end) for end in (1, 2, 3)] == [1, 5, 6]


def test_skipped_tokens_before_the_cut_count_and_after_it_do_not(byte_level):
    begin, letter = byte_level.bos_token_id, byte_level.encode("z", add_special_tokens=False)[0]
    assert tokens_until(byte_level, [begin, letter, begin, begin], 1) == 2


def test_cut_outside_the_text_is_refused(byte_level):
    ids = byte_level.encode("abc", add_special_tokens=False)
    with pytest.raises(ValueError, match=r"text_end is 4, but the .* ids decode to 3 characters"):
        tokens_until(byte_level, ids, 4)
    with pytest.raises(ValueError, match="text_end must be >= 0, got -1"):
        tokens_until(byte_level, ids, -1)
