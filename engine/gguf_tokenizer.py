"""Builds the tokenizer that a GGUF file describes in its metadata.

GGUF stores the vocabulary and the merges, but only a name for how text is cut into words before merging. The names
below are the ones whose rules are known here; another name is refused, since it would give other token ids.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tercet.engine.errors import UnsupportedModel
from tercet.engine.gguf_metadata import Value
from tercet.engine.refusal import short

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

_CONTROL, _USER_DEFINED = 3, 4


def build_tokenizer(metadata: dict[str, Value]) -> Tokenizer:
    """A tokenizer equal to the one that the file was made from."""
    family = metadata.get("tokenizer.ggml.model")
    if family != "gpt2":
        raise UnsupportedModel(f"the GGUF file has tokenizer.ggml.model {family!r}; want 'gpt2' (byte-level BPE)")
    name = metadata.get("tokenizer.ggml.pre")
    tokens = _list(metadata, "tokens", str)
    tokenizer = Tokenizer(_byte_pairs(tokens, _list(metadata, "merges", str), name))
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    if name in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    _add_tokens(tokenizer, tokens, metadata)
    _add_ends(tokenizer, tokens, metadata, name)
    return tokenizer


def _list(metadata: dict[str, Value], name: str, kind: type) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
        raise UnsupportedModel(
            f"the GGUF file has tokenizer.ggml.{name} {short(value)}; want a list of {kind.__name__}, "
            "as byte-level BPE (tokenizer.ggml.model 'gpt2') needs it"
        )
    return value


def _byte_pairs(tokens: list[str], merges: list[str], name: Value | None) -> models.BPE:
    try:
        return models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in merges],
            ignore_merges=name in ("llama-bpe", "llama3", "llama-v3"),
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
        case "smollm":
            steps = [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        case "gpt-2":
            steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        case "llama-bpe" | "llama3" | "llama-v3" | "qwen2" | "deepseek-r1-qwen":
            pattern = _QWEN2 if "qwen" in name else _LLAMA3
            steps = [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        case _:
            raise UnsupportedModel(
                f"the GGUF file has tokenizer.ggml.pre {name!r}; want smollm, gpt-2, llama-bpe or qwen2"
            )
    return pre_tokenizers.Sequence(steps)


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], metadata: dict[str, Value]) -> None:
    kinds = _list({"tokenizer.ggml.token_type": [1] * len(tokens), **metadata}, "token_type", int)
    if len(kinds) != len(tokens):
        raise UnsupportedModel(
            f"the GGUF file has {len(kinds)} tokenizer.ggml.token_type; want {len(tokens)}, one a token"
        )
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def _add_ends(tokenizer: Tokenizer, tokens: list[str], metadata: dict[str, Value], name: Value | None) -> None:
    """Have `encode` begin (and end) a plain prompt as the file says."""
    begins = bool(metadata.get("tokenizer.ggml.add_bos_token", name in ("llama-bpe", "llama3", "llama-v3")))
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
