"""The sentencepiece vocabularies of GGUF files (`tokenizer.ggml.model` is `llama`), as byte-pair encoders.

Such a file has no merges: they follow from the vocabulary. Knows no metadata (`gguf_tokenizer.py`).
"""

from tokenizers import Tokenizer, decoders, models, normalizers

_SPACE = "▁"


def sentencepiece(tokens: list[str], scores: list[float], unknown: str | None, *, prefixed: bool) -> Tokenizer:
    """`prefixed`: texts, and what comes behind special tokens, begin as if there were a space ahead of them."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges(vocab, scores)
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def with_marks(tokens: list[str]) -> list[str]:
    """Gemma's tokens of nothing but spaces, which the files have as they look, spelled like others with spaces."""
    return [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token: first those that make the one with the highest score, and of one token's
    those with the longest left part."""
    found = [
        (scores[token_id], cut, len(token) - cut, token)
        for token, token_id in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    found.sort(key=lambda one: one[:3], reverse=True)
    return [(token[:cut], token[cut:]) for _, cut, _, token in found]
