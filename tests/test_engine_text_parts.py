"""Parts of texts have the ids of the whole, by the tokenizers library itself; what is kept saves encoding, no more."""

import itertools
import json
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tercet.engine.errors import UnsupportedModel
from tercet.engine.model_files import demo_model
from tercet.engine.text_codec import load_codec
from tercet.engine.text_parts import TextParts, cut_tokens, frame
from tercet.ipc.messages import ChatMessage
from tokenizer_process import byte_checkpoint

WORDS = ["a", "b ", " c", "\n", "  ", "hello", "é", "7", "_", ".", "'s", "\t", "日本", "<", "|", "x y z", "end>"]


def special(content: str, **options: bool) -> AddedToken:
    return AddedToken(content, **{"special": True, "normalized": False, **options})


TOKENS = [special("<|im_start|>"), special("<|im_end|>"), special("</s>"), special("[INST]")]


def sentence_like(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return tokenizer


def byte_level(*, prefix: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def llama_2_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def trained(tokenizer: Tokenizer, added: Sequence[AddedToken]) -> Tokenizer:
    size = {"vocab_size": 150, "special_tokens": ["<unk>"], "show_progress": False}
    match type(tokenizer.model).__name__:
        case "BPE":
            trainer = trainers.BpeTrainer(**size)
        case "Unigram":
            trainer = trainers.UnigramTrainer(unk_token="<unk>", **size)
        case "WordPiece":
            trainer = trainers.WordPieceTrainer(**size)
    rng = random.Random(1)
    tokenizer.train_from_iterator(["".join(rng.choices(WORDS, k=200)) for _ in range(40)], trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def parts_of(tokenizer: Tokenizer, tokens: Sequence[str], **options: int) -> tuple[TextParts, list[str]]:
    """And every text that was encoded."""
    encoded: list[str] = []

    def encode(texts: list[str]) -> list[list[int]]:
        encoded.extend(texts)
        return [whole(tokenizer, text) for text in texts]

    return TextParts(encode, tokens, **options), encoded


MAKERS = {
    "bytes": lambda: byte_level(prefix=False),
    "bytes-prefix": lambda: byte_level(prefix=True),
    "metaspace-first": lambda: sentence_like("first"),
    "metaspace-always": lambda: sentence_like("always"),
    "metaspace-never": lambda: sentence_like("never"),
    "llama-2": llama_2_like,
    "word-pieces": word_pieces,
}
OTHERS = {
    "plain": [],
    "takes spaces behind": [special("<|turn|>", rstrip=True), AddedToken("<think>", normalized=False)],
    "normalized": [AddedToken("hello", normalized=True), AddedToken("é7", normalized=True)],
    "whole words": [special("end", single_word=True), special("7", single_word=True)],
    "spaces": [special("  "), special("\n"), special("\t\n")],
}


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("maker", MAKERS)
def test_parts_have_the_ids_of_the_whole(maker: str, others: str) -> None:
    tokenizer = trained(MAKERS[maker](), [*TOKENS, *OTHERS[others]])
    source = "".join(token.content for token in [*TOKENS, *OTHERS[others]])
    tokens = cut_tokens(tokenizer, [source])
    assert {token.content for token in TOKENS} <= set(tokens)
    rng = random.Random(maker + others)
    written = [*tokens, *(token.content for token in OTHERS[others])]
    for least in (1, 20):
        parts, encoded = parts_of(tokenizer, tokens, least_characters=least)
        for _ in range(60):
            text = "".join(rng.choice([*WORDS, *written]) for _ in range(rng.randint(0, 60)))
            assert list(parts.encode(text)) == whole(tokenizer, text), text
            assert list(parts.encode(text)) == whole(tokenizer, text), text
        assert len(encoded) > 100


@pytest.mark.parametrize(
    ("added", "wanted"),
    [
        ([special("<a>", lstrip=True), special("<b>")], ["<b>"]),
        ([special("<a>", single_word=True), special("<b>", rstrip=True)], ["<b>"]),
        ([special("a>"), special("_b"), special(" <c>"), special("▁d"), special("<e>")], ["<e>", "▁d"]),
        ([AddedToken("<a>", normalized=True), AddedToken("<b>", normalized=False)], ["<b>"]),
        # Another token may begin earlier, and have taken the first letters of this one.
        ([special("<a>"), special("x<a>"), special("<b>"), special("y<"), special("[c]")], ["[c]"]),
        ([special("<<"), special("[a]"), special("[a]b"), special("]c")], ["[a]", "[a]b"]),
        # Where a longer one is not taken for a word of its own, what stands there is text.
        ([special("<a>"), special("<a>end", single_word=True), special("<b>")], ["<b>"]),
        ([special("<a>"), special("<a>end"), special("<b>unnamed")], ["<a>", "<a>end"]),
    ],
)
def test_where_a_text_may_be_cut(added: list[AddedToken], wanted: list[str]) -> None:
    tokenizer = trained(byte_level(prefix=False), added)
    sources = [token.content for token in added if "unnamed" not in token.content]
    tokens = cut_tokens(tokenizer, sources)
    assert tokens == wanted
    rng = random.Random(2)
    parts, _ = parts_of(tokenizer, tokens, least_characters=1)
    for _ in range(100):
        text = "".join(rng.choice([*WORDS, *sources, "<", ">", "[", "]", "a"]) for _ in range(20))
        assert list(parts.encode(text)) == whole(tokenizer, text), text


def test_a_tokenizer_that_lacks_letters_cuts_nowhere() -> None:
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="<unk>"))
    tokenizer.add_tokens([special("<s>")])
    assert cut_tokens(tokenizer, ["<s>"]) == []
    parts, encoded = parts_of(tokenizer, [])
    assert list(parts.encode("<s>x<s>")) == [1, 0, 1]
    assert encoded == ["<s>x<s>"]
    assert not parts.num_bytes


@pytest.mark.parametrize("single", ["$A", "</s> $A", "</s> $A [INST]", "$A </s> </s>", "</s> </s> $A </s>"])
def test_what_plain_prompts_begin_and_end_with(single: str) -> None:
    tokenizer = trained(sentence_like("first"), TOKENS)
    names = {token.content: tokenizer.token_to_id(token.content) for token in TOKENS}
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(names.items()))
    begin, end = (
        [names[name] for name in side.split()] for side in single.replace("$A", "-").split("-")
    )  # fmt: skip
    found = frame(tokenizer)
    assert found is not None
    assert [list(ids) for ids in found] == [begin, end]
    for text in ("", "a", "</s>", "hello </s>x"):
        assert tokenizer.encode(text).ids == begin + whole(tokenizer, text) + end


def test_some_tokenizers_have_no_frame() -> None:
    lacking = Tokenizer(models.WordLevel({"x": 0}, unk_token="<unk>"))
    assert frame(lacking) is None
    twice = trained(byte_level(prefix=False), TOKENS)
    end = ("</s>", twice.token_to_id("</s>"))
    twice.post_processor = processors.TemplateProcessing(single="$A </s> $A", special_tokens=[end])
    assert frame(twice) is None
    assert cut_tokens(twice, ["</s>"]) == [], "parts would be written twice each"


def test_plain_prompts_are_encoded_in_parts_too() -> None:
    codec = load_codec(demo_model())
    assert codec.tokenizer is not None
    assert codec.parts is not None
    rng = random.Random(8)
    prompt = ""
    for turn in range(6):
        prompt += f"<|im_start|>user\n{' '.join(rng.choices(WORDS, k=500))}<|im_end|>\n"
        kept = codec.parts.num_bytes
        assert list(codec.encode(prompt, "salt")) == codec.tokenizer.encode(prompt).ids
        assert 0 < codec.parts.num_bytes - kept < 12_000, "no more than what is new"
        assert turn < 5 or kept > 20_000


def test_turns_encode_what_they_add() -> None:
    codec = load_codec(demo_model())
    assert codec.tokenizer is not None
    tokens = cut_tokens(codec.tokenizer, ["<|im_start|>{{ message }}<|im_end|>"])
    assert tokens == ["<|im_end|>", "<|im_start|>"]
    rng = random.Random(3)
    chat = [ChatMessage("system", "Be brief. " * 200)]
    parts, encoded = parts_of(codec.tokenizer, tokens)
    for turn in range(12):
        said = " ".join(rng.choices(WORDS, k=rng.choice([3, 40, 400])))
        chat.append(ChatMessage("user" if turn % 2 == 0 else "assistant", said))
        assert codec.template is not None
        text = codec.template.render(chat)
        before = len(encoded)
        ids = list(parts.encode(text))
        assert ids == whole(codec.tokenizer, text) == list(codec.encode_chat(chat))
        assert sum(map(len, encoded[before:])) <= len(chat[-1].content or "") + (before == 0) * 3000 + 600
    assert len(set(encoded)) == len(encoded), "nothing twice"


def test_salts_share_nothing() -> None:
    tokenizer = trained(byte_level(prefix=False), TOKENS)
    parts, encoded = parts_of(tokenizer, ["</s>"], least_characters=2)
    text = "hello</s>a b c</s>hello"
    assert list(parts.encode(text, "one")) == list(parts.encode(text, "two")) == whole(tokenizer, text)
    assert encoded == ["hello", "</s>a b c", "</s>hello"] * 2
    assert list(parts.encode(text, "one")) == whole(tokenizer, text)
    assert len(encoded) == 6


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    tokenizer = trained(byte_level(prefix=False), TOKENS)
    parts, encoded = parts_of(tokenizer, ["</s>"], least_characters=1, most_bytes=20_000)
    for number in range(100):
        parts.encode(f"</s>always{'x' * 200}</s>{number}{'y' * 200}")
        assert 0 < parts.num_bytes <= 20_000
    assert sum("always" in text for text in encoded) == 1
    assert len(encoded) == 101
    parts.encode(f"</s>99{'y' * 200}")
    assert len(encoded) == 101
    parts.encode(f"</s>0{'y' * 200}")
    assert len(encoded) == 102
    parts.encode("z" * 30_000)
    assert parts.num_bytes == 0, "what is larger than all that may be kept is not"


def test_threads_share_it() -> None:
    tokenizer = trained(byte_level(prefix=False), TOKENS)
    parts = TextParts(lambda texts: [whole(tokenizer, text) for text in texts], ["</s>"], most_bytes=8_000)
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        rng = random.Random(seed % 4)
        start.wait()
        for _ in range(100):
            text = "</s>".join("hello " * rng.randint(0, 90) for _ in range(5))
            assert list(parts.encode(text)) == whole(tokenizer, text)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    kept = itertools.chain.from_iterable((*key, ids) for key, ids in parts._kept.items())
    assert 0 < sum(map(len, kept)) < parts.num_bytes <= 8_000


@pytest.mark.parametrize(
    ("single", "words"),
    [
        ([{"SpecialToken": {"id": "<s>", "type_id": 0}}], "writes '<s>', which is not among its special_tokens"),
        ([{"Sequence": {"id": "B", "type_id": 0}}], "writes a second text"),
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_a_post_processor_over_which_the_library_panics(
    tmp_path: Path, single: list[Any], words: str, inside: bool
) -> None:
    folder = byte_checkpoint(tmp_path)
    step = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    whole = {"type": "Sequence", "processors": [byte_level, step]} if inside else step
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": whole}))
    with pytest.raises(UnsupportedModel, match=rf"tokenizer\.json cannot be used: its post-processor {words}"):
        load_codec(folder)
