"""`--classifier-tokens`: a model that writes text made a classifier, whose labels are tokens that it may say next.

Rerankers are published so: they are asked a question, and the score is how much likelier `yes` is than `no`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tercet.ipc.answers import Classifier
from tercet.model.config import ModelConfig
from tercet.model.config_json import read_object
from tercet.model.gguf_file import read_tokens

_SPACES = (" ", "Ġ", "▁")
"""How vocabularies write a space."""


def with_label_tokens(config: ModelConfig, path: Path, tokens: Sequence[str]) -> ModelConfig:
    """One label, the last of one or two tokens: its logit, or what it has more than the other's. ValueError names what
    is wrong."""
    given = " ".join(tokens)
    if config.classifier is not None:
        raise ValueError(f"--classifier-tokens got {given}; want nothing: this model has a head that classifies")
    if not config.generates:
        raise ValueError(f"--classifier-tokens got {given}; want nothing: without lm_head.weight no token is rated")
    ids = _vocabulary(path)
    found = []
    for token in tokens:
        spellings = [token.replace(" ", space) for space in _SPACES]
        token_id = next((ids[spelling] for spelling in spellings if spelling in ids), None)
        if token_id is None or not 0 <= token_id < config.vocab_size:
            raise ValueError(f"--classifier-tokens got {token!r}, which is no token of this model; want a whole one")
        found.append(token_id)
    if len(set(found)) < len(found):
        raise ValueError(f"--classifier-tokens got {given}; want different tokens")
    return replace(config, classifier=Classifier((tokens[-1],), "sigmoid"), label_tokens=tuple(found))


def _vocabulary(path: Path) -> Mapping[str, int]:
    """Ids by the tokens' own spellings."""
    if path.suffix == ".gguf":
        return {token: index for index, token in enumerate(read_tokens(path))}
    file = path / "tokenizer.json"
    try:
        raw = read_object(file)
        model = raw["model"]["vocab"]
        ids = model if isinstance(model, dict) else {token: index for index, (token, *_) in enumerate(model)}
        return {**ids, **{token["content"]: token["id"] for token in raw.get("added_tokens") or ()}}
    except FileNotFoundError:
        raise ValueError(f"--classifier-tokens wants a tokenizer.json in {path}, which has none") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--classifier-tokens: {file} has no vocabulary that can be read: {error!r:.200}") from None
