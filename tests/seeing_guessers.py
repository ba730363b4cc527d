"""A tiny checkpoint that can see and has a layer that guesses, and what that guesses by transformers' modules."""

import shutil
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

from checkpoints import scratch
from seeing_models import Seeing, seeing
from tercet.ipc.images import IMAGE_IDS

_KIND = "qwen3.5"
_LAYER = "model.language_model.layers.1."
"""One that attends, of which the guessing one has the shapes."""
_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def seeing_guesser(*, large: bool = False) -> Seeing:
    """Its guessing layer is random, too. `large`: with heads as GPUs want them."""
    model, folder = seeing(_KIND, large=large), scratch() / f"seeing-guesser-{large}"
    if folder.exists():
        return model._replace(folder=folder)
    shutil.copytree(model.folder, folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(_LAYER):
            noise = torch.empty_like(tensor).normal_(generator=generator)
            own[name.replace(_LAYER, "mtp.layers.0.")] = tensor + noise * tensor.std()
    hidden = tensors["lm_head.weight"].shape[1]
    for name in _NORMS:
        own[f"mtp.{name}.weight"] = torch.empty(hidden).uniform_(-0.5, 0.5, generator=generator)
    own["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden).normal_(0, (2 * hidden) ** -0.5, generator=generator)
    save_file({**tensors, **own}, folder / "model.safetensors", {"format": "pt"})
    return model._replace(folder=folder)


class ReferenceSeeingGuesser:
    """What the layer says of some tokens and images, all of them computed at once."""

    def __init__(self, model: Seeing) -> None:
        self._model, self._whole = model, model.whole
        self._own = {
            name.removeprefix("mtp."): tensor
            for name, tensor in load_file(model.folder / "model.safetensors").items()
            if name.startswith("mtp.")
        }
        config = self._whole.config.text_config
        self._eps = config.rms_norm_eps
        sizes = {**config.to_dict(), "num_hidden_layers": 1, "layer_types": ["full_attention"]}
        self._layer: Any = Qwen3_5TextModel._from_config(type(config)(**sizes), attn_implementation="eager").eval()
        self._layer.norm = torch.nn.Identity()
        layer = {name: tensor for name, tensor in self._own.items() if name.startswith("layers.")}
        missing, unexpected = self._layer.load_state_dict(layer, strict=False)
        assert (missing, unexpected) == (["embed_tokens.weight"], [])

    @torch.inference_mode()
    def guesses(self, ids: list[int], seen: dict[str, Any], count: int) -> list[int]:
        """The next `count` of these tokens. Those of images are nothing but what the model made of them."""
        guessed: list[int] = []
        token_id = self._model.tokens[0]
        read = torch.tensor([[token_id if one >= IMAGE_IDS else one for one in ids]])
        kinds = {"mm_token_type_ids": (read == token_id).int()} if seen else {}
        grid = {"image_grid_thw": seen["image_grid_thw"]} if seen else {}
        known = {name: kind[:, :-1] for name, kind in kinds.items()}
        hidden_TD = self._whole.model(input_ids=read[:, :-1], **known, **seen).last_hidden_state[0]
        for _ in range(count):
            told = torch.cat((read, torch.tensor([guessed], dtype=read.dtype)), 1)
            types = torch.cat(
                (
                    kinds.get("mm_token_type_ids", torch.zeros_like(read).int()),
                    torch.zeros(1, len(guessed), dtype=torch.int32),
                ),
                1,
            )
            places = self._whole.model.get_rope_index(told[:, :-1], mm_token_type_ids=types[:, :-1], **grid)[0]
            embedded_TD = self._whole.model.get_input_embeddings()(told[0, 1:]) * (told[0, 1:] != token_id)[:, None]
            halves = self._norm(embedded_TD, "pre_fc_norm_embedding"), self._norm(hidden_TD, "pre_fc_norm_hidden")
            joined_TD = torch.cat(halves, 1) @ self._own["fc.weight"].T
            counted = torch.arange(len(hidden_TD))[None, None]
            made_TD = self._layer(
                inputs_embeds=joined_TD[None], position_ids=torch.cat((counted, places))
            ).last_hidden_state[0]
            normed_D = self._norm(made_TD[-1], "norm")
            guessed.append(int(self._whole.lm_head(normed_D).argmax()))
            hidden_TD = torch.cat((hidden_TD, normed_D[None]))
        return guessed

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self._eps).rsqrt() * (self._own[f"{name}.weight"] + 1)
