from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from router.cli.detokenize import TextStream
from workers.sim.tokenizer import IM_END, tokenizer_json

BYTES = Tokenizer.from_str(tokenizer_json())


def test_half_a_character_is_held_back() -> None:
    stream = TextStream(BYTES)
    euro = list("€".encode())
    assert [stream.push([i]) for i in euro] == ["", "", "€"]


def test_special_tokens_are_hidden() -> None:
    stream = TextStream(BYTES)
    assert stream.push([*b"hi", IM_END]) == "hi"
    assert stream.push([IM_END]) == ""
    assert stream.ids == [*b"hi", IM_END, IM_END]


def test_a_character_that_never_ends_is_shown_at_the_end() -> None:
    stream = TextStream(BYTES)
    assert stream.push([*b"a", 0xE2]) == ""
    assert stream.finish() == "a\ufffd"
    assert stream.finish() == ""


def test_word_starts_of_sentencepiece_keep_their_spaces() -> None:
    vocabulary = {"▁the": 0, "▁cat": 1, "s": 2, "<unk>": 3}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.decoder = decoders.Metaspace()
    stream = TextStream(words)
    assert "".join(stream.push([i]) for i in (0, 1, 2, 0)) == "the cats the"


@given(st.text(max_size=40), st.data())
def test_pieces_join_to_the_whole(text: str, data: st.DataObject) -> None:
    ids = list(text.encode())
    stream, pieces = TextStream(BYTES), []
    while ids:
        step = data.draw(st.integers(1, 3))
        pieces.append(stream.push(ids[:step]))
        ids = ids[step:]
    assert "".join([*pieces, stream.finish()]) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
