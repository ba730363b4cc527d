"""Builds the tokenizer that a GGUF file describes in its metadata.

Of byte-level tokenizers GGUF stores the vocabulary and the merges, but only a name for how text is cut into words
before merging. The names below are the ones whose rules are known here; another name is refused, since it would give
other token ids. Of sentencepiece's it stores the vocabulary with scores (`gguf_sentencepiece.py`).
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tercet.engine.errors import UnsupportedModel
from tercet.engine.gguf_metadata import Value
from tercet.engine.gguf_sentencepiece import sentencepiece, with_marks
from tercet.engine.refusal import short

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}?"
_LLAMA3 = rf"{_ENDING}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDING}|{_WORDS}|\p{{N}}|{_REST}"
_GPT4O = rf"{_CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_WHOLE_WORDS = (*_LLAMA3_NAMES, "smaug-bpe")
"""Llama 3's tokenizer, and the same without a first token: a word that is a token does not have to come of merges."""
_PATTERNS = {
    **dict.fromkeys((*_WHOLE_WORDS, "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "gpt-4o": _GPT4O,
}

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
"""The special tokens of Phi-3 that do not take the spaces behind them; no metadata tells them from the others."""


def build_tokenizer(metadata: dict[str, Value]) -> Tokenizer:
    """A tokenizer equal to the one that the file was made from."""
    model, name = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"the GGUF file has tokenizer.ggml.model {model!r}; want 'gpt2' (byte-level BPE) or 'llama' (sentencepiece)"
        )
    tokens, kinds = _list(metadata, "tokens", str), _kinds(metadata)
    if model == "gpt2":
        tokenizer = _byte_level(metadata, tokens, name)
        _add_tokens(tokenizer, tokens, kinds)
    else:
        family = str(metadata.get("general.architecture"))
        is_gemma = family.startswith("gemma")
        tokens = with_marks(tokens) if is_gemma else tokens
        tokenizer = _sentencepiece(metadata, tokens, kinds, is_gemma)
        _add_tokens(tokenizer, tokens, kinds, greedy=family == "phi3")
    _add_ends(tokenizer, tokens, metadata, begins=model == "llama" or name in _LLAMA3_NAMES)
    return tokenizer


def _byte_level(metadata: dict[str, Value], tokens: list[str], name: Value | None) -> Tokenizer:
    tokenizer = Tokenizer(_byte_pairs(tokens, _list(metadata, "merges", str), name))
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    if name in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(metadata: dict[str, Value], tokens: list[str], kinds: list[int], is_gemma: bool) -> Tokenizer:
    for name in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if value := metadata.get(f"tokenizer.ggml.{name}"):
            raise UnsupportedModel(f"the GGUF file has tokenizer.ggml.{name} {short(value)}; want none")
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise UnsupportedModel(
            f"the GGUF file has {len(scores)} tokenizer.ggml.scores; want {len(tokens)}, one a token"
        )
    usual = {score for score, kind in zip(scores, kinds, strict=True) if kind == _NORMAL}
    if len(usual) == 1 and not is_gemma:
        raise UnsupportedModel(
            f"the GGUF file has tokenizer.ggml.scores that are {usual.pop()} for all usual tokens; want those by which "
            "they merge"
        )
    if is_gemma:  # its encoder merges in the order of the vocabulary, which is not that of the scores
        scores = [-float(token_id) for token_id in range(len(tokens))]
    unknown = tokens[kinds.index(_UNKNOWN)] if _UNKNOWN in kinds else None
    return sentencepiece(tokens, scores, unknown, prefixed=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)))


def _kinds(metadata: dict[str, Value]) -> list[int]:
    count = len(_list(metadata, "tokens", str))
    kinds = _list({"tokenizer.ggml.token_type": [_NORMAL] * count, **metadata}, "token_type", int)
    if len(kinds) != count:
        raise UnsupportedModel(f"the GGUF file has {len(kinds)} tokenizer.ggml.token_type; want {count}, one a token")
    return kinds


def _list(metadata: dict[str, Value], name: str, kind: type) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
        raise UnsupportedModel(
            f"the GGUF file has tokenizer.ggml.{name} {short(value)}; want a list of {kind.__name__}, "
            f"as tokenizer.ggml.model {metadata.get('tokenizer.ggml.model')!r} needs it"
        )
    return value


def _byte_pairs(tokens: list[str], merges: list[str], name: Value | None) -> models.BPE:
    try:
        return models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in merges],
            ignore_merges=name in _WHOLE_WORDS,
        )
    except Exception as error:  # noqa: BLE001  the library raises plain Exception
        raise UnsupportedModel(f"the GGUF file's tokens and merges are no byte-level BPE: {error}") from None


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ValueError(f"tokenizer.ggml.merges has {short(merge)!r}; want two tokens with a space between")
    return left, right


def _pre_tokenizer(name: Value | None) -> pre_tokenizers.PreTokenizer:
    match name:
        case "smollm" | "refact" | "starcoder":
            steps = [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        case "gpt-2":
            steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        case str() if name in _PATTERNS:
            steps = [
                pre_tokenizers.Split(Regex(_PATTERNS[name]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        case _:
            raise UnsupportedModel(
                f"the GGUF file has tokenizer.ggml.pre {name!r}; want smollm, refact, starcoder, gpt-2 or "
                f"{', '.join(_PATTERNS)}"
            )
    return pre_tokenizers.Sequence(steps)


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int], *, greedy: bool = False) -> None:
    """`greedy`: they take the spaces behind them."""
    added = [
        AddedToken(
            token,
            special=kind in (_CONTROL, _UNKNOWN),
            normalized=False,
            rstrip=greedy and token not in _PHI3_PLAIN,
        )
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def _add_ends(tokenizer: Tokenizer, tokens: list[str], metadata: dict[str, Value], *, begins: bool) -> None:
    """Have `encode` begin (and end) a plain prompt as the file says; `begins`: where it says nothing."""
    begins = bool(metadata.get("tokenizer.ggml.add_bos_token", begins))
    ends = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    begin = _token(tokens, metadata, "bos") if begins else None
    end = _token(tokens, metadata, "eos") if ends else None
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{f'{begin} ' if begin else ''}$A{f' {end}' if end else ''}",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in {begin, end} if name is not None],
    )


def _token(tokens: list[str], metadata: dict[str, Value], kind: str) -> str:
    token_id = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise UnsupportedModel(f"the GGUF file has tokenizer.ggml.{kind}_token_id {token_id!r}; want a token's id")
    return tokens[token_id]
