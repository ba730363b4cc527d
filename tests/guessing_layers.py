"""Tiny checkpoints with a layer behind the last that guesses tokens, and what it guesses by transformers' modules.

Transformers reads no such layer. So a checkpoint is one of a model with a layer more, whose last layer is called the
guessing one; and the reference is a model of that layer alone, which is given what the layer reads.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel

from checkpoints import make_checkpoint, reference_model
from families import FAMILIES, SHAPE

_QWEN = ("qwen3-next", "qwen3.5", "qwen3.5-moe")
_NAMES = ("token", "hidden", "join", "norm")
_AS_A_LAYER = dict(zip(_NAMES, ("enorm", "hnorm", "eh_proj", "shared_head.norm"), strict=True))
_AS_QWEN = dict(zip(_NAMES, ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), strict=True))
GUESSING = ("glm4-moe", "deepseek-v3", "glm4-moe-lite", *_QWEN)


def guessing_checkpoint(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """One of GUESSING's families; its guessing layer is random, too. `overrides`: of its config.json."""
    kind, settings = FAMILIES[family]
    plain = kind(**{**SHAPE, **settings, **overrides}).to_dict()
    count = plain["num_hidden_layers"]
    longer: dict[str, Any] = {**overrides, "num_hidden_layers": count + 1}
    for name, last in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if isinstance(plain.get(name), list):
            longer[name] = [*plain[name], last]
    make_checkpoint(family, folder, seed, **longer)
    config = json.loads((folder / "config.json").read_text())
    config |= {name: plain[name] for name in ("num_hidden_layers", "layer_types", "mlp_layer_types") if name in config}
    if family not in _QWEN:
        config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    layer, (names, prefix) = f"model.layers.{count}.", _naming(family, count)
    if family in _QWEN:
        tensors = {name.replace(layer, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
    else:  # copies, as files have them
        tensors |= {f"{layer}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
        tensors |= {f"{layer}shared_head.head.weight": tensors["lm_head.weight"].clone()}
    generator, hidden = torch.Generator().manual_seed(seed + 1), config["hidden_size"]
    for name in ("token", "hidden", "norm"):
        tensors[f"{prefix}{names[name]}.weight"] = torch.empty(hidden).uniform_(0.5, 1.5, generator=generator)
    join = torch.empty(hidden, 2 * hidden).normal_(0.0, (2 * hidden) ** -0.5, generator=generator)
    save_file({**tensors, f"{prefix}{names['join']}.weight": join}, folder / "model.safetensors", {"format": "pt"})
    return folder


def _naming(family: str, num_layers: int) -> tuple[dict[str, str], str]:
    return (_AS_QWEN, "mtp.") if family in _QWEN else (_AS_A_LAYER, f"model.layers.{num_layers}.")


class ReferenceGuesser:
    """What a checkpoint's guessing layer says of some tokens, all of them computed at once."""

    def __init__(self, family: str, path: Path) -> None:
        self._model = reference_model(path)
        config = self._model.config
        names, prefix = _naming(family, config.num_hidden_layers)
        self._tensors = load_file(path / "model.safetensors")
        self._own = {name: self._tensors[f"{prefix}{stored}.weight"] for name, stored in names.items()}
        self._shift = 1.0 if family in _QWEN else 0.0  # of weights of norms
        self._reads_normed = family in _QWEN
        self._eps = config.rms_norm_eps
        layer = "mtp.layers.0." if family in _QWEN else f"model.layers.{config.num_hidden_layers}."
        self._layer = _alone(config, path, layer, self._tensors)

    def guesses(self, ids: list[int], count: int) -> list[int]:
        """The next `count` of these tokens."""
        with torch.inference_mode():
            hidden_TD = self._model.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
            guessed: list[int] = []
            for _ in range(count):
                embedded_TD = self._model.model.embed_tokens(torch.tensor([*ids, *guessed][1:]))
                halves = self._norm(embedded_TD, "token"), self._norm(hidden_TD, "hidden")
                joined_TD = torch.cat(halves, 1) @ self._own["join"].T
                made_D = self._layer(inputs_embeds=joined_TD[None]).last_hidden_state[0, -1]
                normed_D = self._norm(made_D, "norm")
                guessed.append(int(self._model.lm_head(normed_D).argmax()))
                hidden_TD = torch.cat((hidden_TD, (normed_D if self._reads_normed else made_D)[None]))
            return guessed

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self._eps).rsqrt() * (self._own[name] + self._shift)


def _alone(config: Any, path: Path, layer: str, tensors: dict[str, Tensor]) -> Any:
    """A transformers model of that layer and nothing else, without a norm at its end."""
    folder = path / "guessing_layer"
    folder.mkdir(exist_ok=True)
    sizes = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 1}
    for name, only in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if name in sizes:
            sizes[name] = [only]
    if "first_k_dense_replace" in sizes:
        sizes["first_k_dense_replace"] = 0
    sizes["mlp_only_layers"] = []
    (folder / "config.json").write_text(json.dumps(sizes))
    own = {name.replace(layer, "model.layers.0."): tensor for name, tensor in tensors.items() if name.startswith(layer)}
    others = {name: tensors[name] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    save_file(own | others, folder / "model.safetensors", {"format": "pt"})
    loaded = AutoConfig.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, config=loaded, dtype=torch.float32, attn_implementation="eager").eval()
    model.norm = torch.nn.Identity()
    return model


def foreseen_checkpoint(family: str, folder: Path, **overrides: Any) -> Path:
    """One whose guessing layer knows all, where the next token follows from the last alone: all layers add nothing, and
    the guessing one reads embeddings only, and ends in the model's own norm."""
    guessing_checkpoint(family, folder, **overrides)
    config = json.loads((folder / "config.json").read_text())
    names, prefix = _naming(family, config["num_hidden_layers"])
    tensors = load_file(folder / "model.safetensors")
    shift = 1.0 if family in _QWEN else 0.0
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
            tensor.zero_()
    join_DE = tensors[f"{prefix}{names['join']}.weight"].zero_()
    join_DE[:, : len(join_DE)] = torch.diag(1 / (tensors[f"{prefix}{names['token']}.weight"] + shift))
    tensors[f"{prefix}{names['norm']}.weight"].copy_(tensors["model.norm.weight"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
