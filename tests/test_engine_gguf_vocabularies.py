"""Tokenizers of GGUF files against those of transformers, and against the plainest sentencepiece there can be."""

import functools
import itertools
import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from tercet.engine.errors import UnsupportedModel
from tercet.engine.gguf_tokenizer import build_tokenizer
from tercet.engine.pieces import Pieces

CORPUS = [
    "The first line asks, the second answers, and the third goes on; they're done: it's 12345 or 1,000,000.",
    "the cat sat on the mat and the dog ran after the ball  until the rain   came down and everyone went home again",
    "Every request ends in exactly one terminal message\n\n\twhatever happens. HTTPServer, camelCase, naïve café über",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "   three spaces ahead, two behind  ",
    "aaaaaaaaaaaaaa the the thethethe aaa aa",
    "東京 Привет мир 🙂🙃 ÇA Ǆ e\u0301",
    "I'LL say we've 7 x 77 x 777 x 7777\r\n\r\n!!! ??\n/path/to\n",
    "<s>the</s> cat<unk>",
]
GREEDY = ["<|user|>\n the cat<|end|>\n<|user|>  and", "<s> the</s>  dog<|endoftext|> cat"]


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    letters = "aetho  .\n1'é"
    return ["".join(rng.choice(letters) for _ in range(rng.randrange(40))) for _ in range(count)]


@functools.cache
def byte_level() -> tuple[list[str], list[str]]:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    vocab = bpe.get_vocab()
    merges = [f"{left} {right}" for left, right in _merges(bpe)]
    return [*sorted(vocab, key=vocab.__getitem__), "<|end|>"], merges


def _merges(bpe: Tokenizer) -> list[list[str]]:
    merges: list[list[str]] = json.loads(bpe.to_str())["model"]["merges"]
    return merges


@functools.cache
def pieces() -> tuple[list[str], list[float], list[int]]:
    """As sentencepiece has them: special tokens, bytes, what was merged, single letters."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=260, show_progress=False))
    taken = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "<|endoftext|>", "▁▁", "▁▁▁", "\n\n"]
    merged = [one for one in dict.fromkeys("".join(pair) for pair in _merges(bpe)) if one not in taken]
    letters = sorted(set(bpe.get_vocab()) - {*merged, *taken})
    tokens = [*taken, *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    scores = [0.0] * (len(taken) + 256) + [-float(rank) for rank in range(len(merged) + len(letters))]
    kinds = [2, *[3] * 5, *[4] * 3, *[6] * 256, *[1] * (len(merged) + len(letters))]
    return tokens, scores, kinds


def sentencepiece_metadata(architecture: str, **more: Any) -> dict[str, Any]:
    tokens, scores, kinds = pieces()
    if architecture == "gemma3":  # the converter writes spaces as they look
        tokens = [token.replace("▁", " ") if kind == 4 else token for token, kind in zip(tokens, kinds, strict=True)]
    else:
        kinds = [1 if kind == 4 else kind for kind in kinds]
    values = {"model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": kinds, **more}
    return {
        "general.architecture": architecture,
        **{f"tokenizer.ggml.{name}": value for name, value in values.items()},
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def in_transformers(metadata: dict[str, Any]) -> Tokenizer:
    names = {"tokenizer_type": "model", "pre_tokenizer_type": "pre"}
    names |= {name: name for name in ("tokens", "scores", "merges", "token_type")}
    given = {ours: metadata[key] for ours, name in names.items() if (key := f"tokenizer.ggml.{name}") in metadata}
    return convert_gguf_tokenizer(metadata["general.architecture"], given)[0]


def assert_same(ours: Tokenizer, theirs: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False), text


@pytest.mark.parametrize("name", ["llama-bpe", "smaug-bpe", "dbrx", "qwen2", "gpt-4o"])
def test_byte_level_patterns(name: str) -> None:
    tokens, merges = byte_level()
    kinds = [1] * (len(tokens) - 1) + [3]
    values = {"model": "gpt2", "pre": name, "tokens": tokens, "merges": merges, "token_type": kinds}
    metadata = {
        "general.architecture": "llama",
        **{f"tokenizer.ggml.{key}": value for key, value in values.items()},
        "tokenizer.ggml.add_bos_token": False,
    }
    ours, theirs = build_tokenizer(metadata), in_transformers(metadata)
    texts = [text for text in TEXTS + random_texts(200) if name != "qwen2" or "\u0301" not in text]
    assert_same(ours, theirs, [*texts, "the cat<|end|>the dog"])


@pytest.mark.parametrize(("name", "is_whole"), [("llama-bpe", True), ("smaug-bpe", True), ("dbrx", False)])
def test_words_that_no_merges_make(name: str, is_whole: bool) -> None:
    tokens, merges = byte_level()
    values = {"model": "gpt2", "pre": name, "tokens": [*tokens, "zzz"], "merges": merges, "add_bos_token": False}
    tokenizer = build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in values.items()})
    assert tokenizer.encode("zzz").ids == ([len(tokens)] if is_whole else [tokens.index("z")] * 3)


@pytest.mark.parametrize("name", ["smollm", "refact", "starcoder"])
def test_digits_by_themselves(name: str) -> None:
    tokens, merges = byte_level()
    theirs = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    theirs.decoder = decoders.ByteLevel()
    values = {"model": "gpt2", "pre": name, "tokens": tokens, "merges": merges}
    assert_same(build_tokenizer({f"tokenizer.ggml.{k}": v for k, v in values.items()}), theirs, TEXTS)


@pytest.mark.parametrize(("architecture", "prefixed"), [("gemma3", False), ("phi3", True)])
def test_sentencepiece_as_in_transformers(architecture: str, prefixed: bool) -> None:
    metadata = sentencepiece_metadata(architecture, add_space_prefix=prefixed)
    plain = [text for text in TEXTS + random_texts(200) if "<" not in text]
    assert_same(build_tokenizer(metadata), in_transformers(metadata), plain)


def plain_sentencepiece(text: str, prefixed: bool) -> list[int]:
    """Of two neighbours that make a token those with the highest score merge, until none do."""
    tokens, scores, _ = pieces()
    parts = list((" " * prefixed + text).replace(" ", "▁"))
    while True:
        pairs = [
            (scores[tokens.index(left + right)], -at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in tokens
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    lacking = [[f"<0x{byte:02X}>" for byte in part.encode()] if part not in tokens else [part] for part in parts]
    return [tokens.index(token) for part in lacking for token in part]


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentencepiece_by_scores(prefixed: bool) -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata("llama", add_space_prefix=prefixed))
    for text in TEXTS + random_texts(200):
        if text and "<" not in text:
            assert tokenizer.encode(text, add_special_tokens=False).ids == plain_sentencepiece(text, prefixed), text


def test_special_tokens_of_sentencepiece() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata("llama"))
    the, cat = (tokenizer.encode(word, add_special_tokens=False).ids for word in ("the", "cat"))
    assert tokenizer.encode("<s>the</s>cat<unk>").ids == [1, 1, *the, 2, *cat, 0]
    assert tokenizer.decode([1, *the, 2, *cat]) == "the cat"
    assert build_tokenizer(sentencepiece_metadata("llama", add_bos_token=False)).encode("the").ids == the


@pytest.mark.parametrize(("architecture", "prefixed"), [("gemma3", False), ("llama", True)])
def test_pieces_of_sentencepiece(architecture: str, prefixed: bool) -> None:
    """Answers stream: what tokens add one by one is the text."""
    tokenizer = build_tokenizer(sentencepiece_metadata(architecture, add_space_prefix=prefixed))
    pieces_of = Pieces(tokenizer)
    ids = tokenizer.encode("the  cat\n\tü🙂", add_special_tokens=False).ids
    whole = b"".join(piece.encode() if isinstance(piece, str) else piece for piece in map(pieces_of.__getitem__, ids))
    assert whole.decode()[pieces_of.strip :] == "the  cat\n\tü🙂"
    assert pieces_of.strip == prefixed


def test_special_tokens_of_phi_3_take_spaces() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata("phi3"))
    for text, without in zip(
        GREEDY, ("<|user|>the cat<|end|><|user|>and", "<s> the</s>dog<|endoftext|> cat"), strict=True
    ):
        assert tokenizer.encode(text).ids == tokenizer.encode(without).ids
    assert tokenizer.encode("<s> the").ids != tokenizer.encode("<s>the").ids


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"scores": None}, "scores None; want a list of float, as tokenizer.ggml.model 'llama' needs it"),
        ({"scores": [1.0]}, "has 1 tokenizer.ggml.scores; want"),
        (
            {"scores": [-1000.0] * len(pieces()[0])},
            "scores that are -1000.0 for all usual tokens; want those by which they",
        ),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces True; want none"),
        ({"precompiled_charsmap": [1]}, r"precompiled_charsmap \[1\]; want none"),
    ],
)
def test_refuses_sentencepiece(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        build_tokenizer(sentencepiece_metadata("llama", **more))
