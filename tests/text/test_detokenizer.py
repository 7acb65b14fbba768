import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from eagle_jax.text import StreamingDetokenizer, Tokenizer
from eagle_jax.text.byte_level import BYTE_OF_CHARACTER, token_bytes

EMOJI = "a😀👩‍👩‍👧🇫🇷é日本語 the  and\n\t0123"


def groups(ids, sizes):
    """Splits ids into groups of the sizes given, the rest in a last one; a size of 0 is an empty push."""
    at = 0
    for size in sizes:
        yield ids[at : at + size]
        at += size
    yield ids[at:]


def stream(tokenizer, ids, sizes=(), skip=True):
    detokenizer = StreamingDetokenizer(tokenizer, skip_special_tokens=skip)
    deltas = [detokenizer.push(group) for group in groups(ids, sizes)]
    return [*deltas, detokenizer.finish()]


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_deltas_join_to_the_decoded_text_whatever_the_ids_and_the_split(tokenizer, data):
    # Any ids at all: broken characters, special tokens between bytes, ids that no token has.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=40))
    skip = data.draw(st.booleans())
    assert "".join(stream(tokenizer, ids, sizes, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def byte_id(tokenizer, value):
    """The token of one byte."""
    id_ = tokenizer.backend.token_to_id(f"<0x{value:02X}>")
    return tokenizer.backend.token_to_id(CHARACTER_OF_BYTE[value]) if id_ is None else id_


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_deltas_join_to_the_decoded_text_for_streams_of_raw_bytes(tokenizer, data):
    # Lead and continuation bytes mostly, where the two UTF-8 decoders could disagree.
    byte = st.sampled_from([*range(0x7E, 0xC3), *range(0xDF, 0xF6), 0x41, 0x20, 0xFF])
    ids = [byte_id(tokenizer, value) for value in data.draw(st.lists(byte, max_size=24))]
    sizes = data.draw(st.lists(st.integers(0, 3), max_size=24))
    assert "".join(stream(tokenizer, ids, sizes)) == tokenizer.decode(ids)


def test_byte_alphabet_is_that_of_tokenizers():
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    assert set(BYTE_OF_CHARACTER) == set(pre_tokenizers.ByteLevel.alphabet())
    for character in map(chr, [*range(0x800), 0x1234, 0x8A9E, 0x1F600]):
        assert token_bytes(spell(character)[0][0]) == character.encode()
    assert token_bytes("two words") == b"two words"


@settings(max_examples=120, deadline=None)
@given(text=st.text(alphabet=st.sampled_from(EMOJI), max_size=20), data=st.data())
def test_valid_text_never_shows_a_replacement_character(tokenizer, text, data):
    ids = tokenizer.encode(text)
    sizes = data.draw(st.lists(st.integers(0, 3), max_size=20))
    deltas = stream(tokenizer, ids, sizes)
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == text


def test_character_comes_whole_with_its_last_byte(byte_level):
    ids = byte_level.encode("é語🙂", add_special_tokens=False)
    detokenizer = StreamingDetokenizer(byte_level)
    deltas = [detokenizer.push([id_]) for id_ in ids]
    assert "".join(deltas) == "é語🙂"  # nothing is left for finish()
    assert deltas[-1] == "🙂"
    assert "" in deltas
    assert detokenizer.finish() == ""


def test_incomplete_character_comes_at_the_end_only(byte_level):
    ids = byte_level.encode("x🙂", add_special_tokens=False)[:-1]
    detokenizer = StreamingDetokenizer(byte_level)
    assert detokenizer.push(ids) == "x"
    assert detokenizer.finish() == "\ufffd" == byte_level.decode(ids)[1:]


def test_sentencepiece_spaces_are_kept_except_the_prefix(sentencepiece):
    ids = sentencepiece.encode("the  and the")
    assert "".join(stream(sentencepiece, ids, [1] * len(ids))) == "the  and the"
    # The prefix belongs to the first visible token, however many special ones come before it.
    the, begin = sentencepiece.backend.token_to_id("▁the"), sentencepiece.bos_token_id
    assert stream(sentencepiece, [begin, begin, the, the], [1, 1, 1, 1]) == ["", "", "the", " the", "", ""]
    # A text that starts without a space has none to lose, then or later.
    letter = sentencepiece.backend.token_to_id("a")
    assert stream(sentencepiece, [letter, the], [1, 1]) == ["a", " the", "", ""]


def test_run_of_byte_tokens_is_held_until_it_ends(sentencepiece):
    letter = sentencepiece.backend.token_to_id("a")
    good = [byte_id(sentencepiece, 0xC3), byte_id(sentencepiece, 0xA9)]
    broken = [*good, byte_id(sentencepiece, 0xFF)]
    # The same two bytes read differently depending on what follows, so they cannot be shown before.
    assert sentencepiece.decode([*good, letter]) == "éa"
    assert sentencepiece.decode([*broken, letter]) == "\ufffd\ufffd\ufffda"
    assert stream(sentencepiece, [*good, letter], [1, 1, 1]) == ["", "", "éa", "", ""]
    assert stream(sentencepiece, [*broken, letter], [2, 1, 1]) == ["", "", "\ufffd\ufffd\ufffda", "", ""]


def test_the_stream_of_the_tokenizers_package_is_wrong_about_runs_of_bytes(sentencepiece):
    # When this fails, `StreamingDetokenizer` may no longer be needed.
    ids = [byte_id(sentencepiece, byte) for byte in (0xC3, 0xA9, 0xFF)] + [sentencepiece.backend.token_to_id("a")]
    theirs = decoders.DecodeStream(skip_special_tokens=True)
    assert [theirs.step(sentencepiece.backend, id_) for id_ in ids[:3]] == [None, "é", None]
    with pytest.raises(Exception, match="Invalid prefix"):
        theirs.step(sentencepiece.backend, ids[3])
    assert "".join(stream(sentencepiece, ids, [1] * 4)) == sentencepiece.decode(ids) == "\ufffd\ufffd\ufffda"


def test_every_token_is_looked_up_once(byte_level, monkeypatch):
    calls = []
    broken = [
        byte_id(byte_level, 0xE2)
    ] * 500  # never a whole character, the case that makes a growing window quadratic

    class Counting:
        def __init__(self, backend):
            self.id_to_token = lambda id_: calls.append(id_) or backend.id_to_token(id_)
            self.get_added_tokens_decoder = backend.get_added_tokens_decoder
            self.decoder = backend.decoder

    monkeypatch.setattr(byte_level, "_backend", Counting(byte_level.backend))
    stream(byte_level, broken, [1] * 500)
    assert len(calls) == 500


def test_wrong_use_is_refused(byte_level):
    detokenizer = StreamingDetokenizer(byte_level)
    with pytest.raises(ValueError, match="ids must be >= 0, got -1"):
        detokenizer.push([-1])
    with pytest.raises(TypeError):
        detokenizer.push([1.5])
    detokenizer.finish()
    assert detokenizer.finish() == ""
    with pytest.raises(RuntimeError, match="after finish"):
        detokenizer.push([1])


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Strip(" ", 0, 1)])
def test_decoder_that_is_not_understood_is_refused(decoder):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ValueError, match="cannot stream through the decoder"):
        StreamingDetokenizer(Tokenizer(backend))
