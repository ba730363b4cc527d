"""The streamed detokenizer against the tokenizers library's own decoding, and stop strings against a plain search."""

import random
from collections.abc import Callable
from typing import SupportsIndex

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tercet.engine.detokenizer import Detokenizer
from tercet.engine.errors import UnsupportedModel
from tercet.engine.pieces import Pieces
from tokenizer_process import EOS, byte_tokenizer

TEXTS = ["Größe", "日本語", "🦙 llamas", "a  b", " lead", "naïve\n", "\N{REPLACEMENT CHARACTER}", "e\u0301", "👩‍👩‍👧"]


def merged_byte_level() -> Tokenizer:
    """Byte-level with tokens of several bytes, some of which are not whole characters, and odd added tokens."""
    tokenizer = byte_tokenizer()
    vocab = tokenizer.get_vocab()
    del vocab["</s>"]
    merges = []
    for text in TEXTS:
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
        for size in (2, 3, 4):
            for start in range(0, len(pieces) - size + 1, 2):
                left, right = pieces[start : start + size - 1], pieces[start + size - 1]
                if left in vocab and left + right not in vocab:
                    vocab[left + right] = len(vocab)
                    merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<a b>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("日本語")])
    return tokenizer


def metaspace_vocabulary() -> dict[str, int]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁▁", "▁the", "th", "e", "▁a", "b▁c", "é", "日", ".", "▁Größe", "\n", "x▁"]
    return {token: token_id for token_id, token in enumerate(tokens)}


def metaspace(decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(metaspace_vocabulary(), [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("[TOOL▁]"), AddedToken(" spaced ")])
    return tokenizer


def llama() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return metaspace(decoders.Sequence(steps))


def gemma() -> Tokenizer:
    return metaspace(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def two_spaces_stripped() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    return metaspace(decoders.Sequence(steps))


def prepending_metaspace() -> Tokenizer:
    return metaspace(decoders.Metaspace(prepend_scheme="always"))


def plain_metaspace() -> Tokenizer:
    return metaspace(decoders.Metaspace(prepend_scheme="never"))


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


KINDS = [
    byte_tokenizer,
    merged_byte_level,
    llama,
    gemma,
    two_spaces_stripped,
    prepending_metaspace,
    plain_metaspace,
    words,
]


def random_ids(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Any ids, and runs of bytes that do make characters, and ids that are not in the vocabulary."""
    size = tokenizer.get_vocab_size()
    ids: list[int] = []
    for _ in range(rng.randrange(12)):
        match rng.randrange(4):
            case 0:
                ids += [rng.randrange(size + 3) for _ in range(rng.randrange(6))]
            case 1:
                ids += [rng.randrange(max(0, size - 20), size) for _ in range(rng.randrange(4))]
            case _ if tokenizer.token_to_id("<0x00>") is not None:
                ids += [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in rng.choice(TEXTS).encode()]
            case _:
                ids += tokenizer.encode(rng.choice(TEXTS)).ids if len(tokenizer.get_vocab()) > 10 else []
    return ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_all_that_comes_out_is_the_decoding_of_all_ids(kind: Callable[[], Tokenizer], skip: bool) -> None:
    tokenizer = kind()
    pieces = Pieces(tokenizer)
    rng = random.Random(f"{kind.__name__} {skip}")
    seen = set()
    for _ in range(1500):
        ids = random_ids(rng, tokenizer)
        detokenizer = Detokenizer(pieces, skip_special_tokens=skip)
        text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.finish()
        assert text == tokenizer.decode(ids, skip_special_tokens=skip), ids
        seen.add(text)
    assert len(seen) > 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_an_answer_says_what_it_adds_to_its_prompt(kind: Callable[[], Tokenizer], skip: bool) -> None:
    tokenizer = kind()
    pieces = Pieces(tokenizer)
    rng = random.Random(f"{kind.__name__} {skip}")
    ordinary = set(range(tokenizer.get_vocab_size())) - pieces.special_ids
    whole = [token_id for token_id in ordinary if isinstance(pieces[token_id], str)]
    seen = set()
    for _ in range(1500):
        # No run of bytes goes on behind the prompt: else it may end inside a character.
        prompt_ids = [*random_ids(rng, tokenizer)[: rng.randrange(4)], rng.choice(whole)]
        ids = random_ids(rng, tokenizer)
        detokenizer = Detokenizer(pieces, skip_special_tokens=skip, prompt_ids=prompt_ids)
        text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.finish()
        before = tokenizer.decode(prompt_ids, skip_special_tokens=skip)
        assert before + text == tokenizer.decode(prompt_ids + ids, skip_special_tokens=skip), (prompt_ids, ids)
        seen.add(text)
    assert len(seen) > 100


def test_the_space_before_an_answer_s_first_word() -> None:
    tokenizer = llama()
    prompt_ids = [tokenizer.token_to_id(token) for token in ("<s>", "▁the")]
    answer = tokenizer.token_to_id("▁a")
    for begin, wanted in ((prompt_ids, " a"), (prompt_ids[:1], "a"), ((), "a")):
        assert Detokenizer(Pieces(tokenizer), prompt_ids=begin).push(answer) == wanted


@pytest.mark.parametrize("kind", [byte_tokenizer, merged_byte_level, llama, gemma])
def test_never_half_a_character(kind: Callable[[], Tokenizer]) -> None:
    tokenizer = kind()
    pieces = Pieces(tokenizer)
    for text in TEXTS:
        if text == "\N{REPLACEMENT CHARACTER}":
            continue
        if tokenizer.token_to_id("<0x00>") is None:
            ids = tokenizer.encode(text).ids
        else:
            ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
        assert ids
        detokenizer = Detokenizer(pieces)
        for token_id in ids:
            assert "\N{REPLACEMENT CHARACTER}" not in detokenizer.push(token_id)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(Pieces(tokenizer), ["stop"])
    got = [detokenizer.push(token_id) for token_id in tokenizer.encode("é s ststx").ids]
    assert got == ["", "é", " ", "", "s ", "", "", "st", "", "stx"]


def test_a_character_cut_off_at_the_end_is_replaced() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(Pieces(tokenizer))
    ids = tokenizer.encode("aé").ids[:-1]
    assert [detokenizer.push(token_id) for token_id in ids] == ["a", ""]
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By looking at every beginning of the text: where it stops, and by what."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return end, max(hits, key=len)
    return None


@pytest.mark.parametrize("include", [True, False])
def test_stop_strings_across_tokens(include: bool) -> None:
    tokenizer = merged_byte_level()
    pieces = Pieces(tokenizer)
    rng = random.Random(include)
    num_hits = num_held = 0
    for _ in range(4000):
        alphabet = rng.choice(["ab", "aé日", "ab \n"])
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(25)))
        stops = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(1, 5))]
        detokenizer = Detokenizer(pieces, stops, include_stop=include)
        got = ""
        for token_id in tokenizer.encode(text).ids:
            got += detokenizer.push(token_id)
            # What has been said is never taken back, and no more is held than might begin a stop string.
            if detokenizer.stop_hit is not None:
                break
        if detokenizer.stop_hit is None:
            held = detokenizer.finish()
            num_held += bool(held)
            assert not held or any(stop.startswith(held) for stop in stops)
            got += held
        wanted = first_stop(text, stops)
        if wanted is None:
            assert (got, detokenizer.stop_hit) == (text, None)
        else:
            end, stop = wanted
            num_hits += 1
            assert detokenizer.stop_hit == stop
            assert got == text[: end if include else end - len(stop)]
            assert detokenizer.finish() == ""
    assert num_hits > 500
    assert num_held > 100


class LookedAt(str):
    """Counts the characters that are asked for."""

    count = 0

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        LookedAt.count += 1
        return super().__getitem__(index)


def test_long_stop_strings_take_no_time_before_the_text_looks_like_them() -> None:
    """Of a request's 256 answers each has its own: 4 million characters, in the loop that everybody waits for."""
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(Pieces(tokenizer), [LookedAt("ab" * 512)] * 16)
    for token_id in tokenizer.encode("aab").ids:
        detokenizer.push(token_id)
    assert 0 < LookedAt.count < 16 * 20


def test_a_stop_string_inside_the_last_bytes() -> None:
    """Bytes that end a text without making a character become a replacement character, and that may be stopped on."""
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(Pieces(tokenizer), ["x\N{REPLACEMENT CHARACTER}"])
    text = "".join(detokenizer.push(token_id) for token_id in tokenizer.encode("axé").ids[:-1])
    assert text + detokenizer.finish() == "a"
    assert detokenizer.stop_hit == "x\N{REPLACEMENT CHARACTER}"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(Pieces(tokenizer), ["ab"], min_tokens=3)
    text = ""
    for token_id in tokenizer.encode("abababab").ids:
        text += detokenizer.push(token_id)
        if detokenizer.stop_hit:
            break
    assert text == "ab"  # the second ends behind the third token, and as in vLLM it is no matter where it begins


@pytest.mark.parametrize("stop", ["a", "aa", "aaaab", "ab", "ba", "bab", "babab"])
@pytest.mark.parametrize("min_tokens", range(9))
def test_the_first_stop_string_that_ends_behind_min_tokens(stop: str, min_tokens: int) -> None:
    tokenizer, whole = byte_tokenizer(), "aaaababa"
    end = next((end for end in range(min_tokens + 1, 9) if whole[:end].endswith(stop)), None)
    detokenizer = Detokenizer(Pieces(tokenizer), [stop], min_tokens=min_tokens)
    parts = []
    for token_id in tokenizer.encode(whole).ids:
        parts.append(detokenizer.push(token_id))
        if detokenizer.stop_hit:
            break
    assert detokenizer.stop_hit == (None if end is None else stop)
    assert "".join(parts) + detokenizer.finish() == (whole if end is None else whole[: end - len(stop)])


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None)
    assert [detokenizer.push(EOS), detokenizer.push(10**6), detokenizer.finish()] == ["", "", ""]


def test_a_decoder_that_cannot_be_streamed_is_named() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Pieces(tokenizer)
