"""Tiny vision encoders of each kind as transformers makes them, with odd sizes, in folders as checkpoints have them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3Model,
    Gemma4Config,
    Gemma4Model,
    InternVLConfig,
    InternVLModel,
    Mistral3Config,
    Mistral3Model,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import convert_image_to_patches
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionConfig, Glm4vVisionModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionConfig,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLVisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionConfig, Qwen3_5VisionModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionModel

OUT = 40
"""The language model's hidden size."""
_SHARED = {"depth": 4, "num_heads": 3}
_LATER = {
    **_SHARED,
    "hidden_size": 48,
    "intermediate_size": 52,
    "out_hidden_size": OUT,
    "num_position_embeddings": 25,
    "patch_size": 4,
}
_INTERNVIT = {
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "hidden_size": 48,
    "intermediate_size": 52,
    "patch_size": 6,
    "image_size": 24,  # tokens of two patches a side
    "layer_norm_eps": 1e-3,
    "image_seq_length": 4,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2_vl": (
        Qwen2VLVisionConfig,
        Qwen2VisionTransformerPretrainedModel,
        {**_SHARED, "embed_dim": 48, "hidden_size": OUT, "mlp_ratio": 3, "patch_size": 6},
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLVisionConfig,
        Qwen2_5_VisionTransformerPretrainedModel,
        {
            **_SHARED,
            "hidden_size": 60,
            "intermediate_size": 52,
            "out_hidden_size": OUT,
            "patch_size": 6,
            "window_size": 36,  # 3 tokens
            "fullatt_block_indexes": [1, 3],
        },
    ),
    "qwen3_vl": (Qwen3VLVisionConfig, Qwen3VLVisionModel, {**_LATER, "deepstack_visual_indexes": [0, 2, 3]}),
    "qwen3_5": (Qwen3_5VisionConfig, Qwen3_5VisionModel, _LATER),
    "mistral3": (
        Mistral3Config,
        Mistral3Model,
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "hidden_size": 48,
            "intermediate_size": 52,
            "patch_size": 6,
            "hidden_act": "silu",
        },
    ),
    "gemma3": (
        Gemma3Config,
        Gemma3Model,
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "hidden_size": 48,
            "intermediate_size": 52,
            "patch_size": 6,
            "image_size": 36,  # tokens of three patches a side
            "layer_norm_eps": 1e-3,
            "mm_tokens_per_image": 4,
        },
    ),
}
KINDS |= {
    "internvl": (InternVLConfig, InternVLModel, {**_INTERNVIT, "attention_bias": True}),
    "internvl-large": (  # as those of 38B and more
        InternVLConfig,
        InternVLModel,
        {**_INTERNVIT, "norm_type": "rms_norm", "use_qk_norm": True, "use_mean_pooling": False},
    ),
}
_GLM = {
    **_SHARED,
    "hidden_size": 48,
    "patch_size": 6,
    "image_size": 30,
    "out_hidden_size": OUT,
    "intermediate_size": 52,
    "rms_norm_eps": 1e-3,
}
KINDS |= {
    "glm4v": (Glm4vVisionConfig, Glm4vVisionModel, _GLM),
    "glm4v_moe": (Glm4vVisionConfig, Glm4vVisionModel, {**_GLM, "attention_bias": True, "image_size": 84}),
}
KINDS["gemma4"] = (
    Gemma4Config,
    Gemma4Model,
    {
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "hidden_size": 48,
        "intermediate_size": 52,
        "patch_size": 6,
        "pooling_kernel_size": 2,
        "position_embedding_size": 600,
        "rms_norm_eps": 1e-3,
        "standardize": True,
    },
)
KINDS["gemma4-clipped"] = (  # as in small ones
    Gemma4Config,
    Gemma4Model,
    {**KINDS["gemma4"][2], "standardize": False, "use_clipped_linears": True},
)
_TEXT = {"model_type": "mistral", "hidden_size": OUT, "rms_norm_eps": 1e-3}
_INSIDE = {
    "mistral3": ("pixtral", "mistral"),
    "gemma3": ("siglip_vision_model", "gemma3_text"),
    "gemma4": ("gemma4_vision", "gemma4_text"),
    "gemma4-clipped": ("gemma4_vision", "gemma4_text"),
    "internvl": ("internvl_vision", "qwen3"),
    "internvl-large": ("internvl_vision", "llama"),
}
"""Where the tower alone would lack what makes rows: its model_type, and the language model's."""
_OF_WHOLE = ("multimodal_projector_bias", "spatial_merge_size", "mm_tokens_per_image", "image_seq_length")


class Tower(NamedTuple):
    """A folder, and what transformers makes of it."""

    folder: Path
    raw: dict[str, Any]
    model: Any

    def seen(self, pixels: Tensor, mean: tuple[float, ...], deviation: tuple[float, ...]) -> list[Tensor]:
        """Rows of an image, then those of deeper looks."""
        if isinstance(self.model, Mistral3Model):
            normal = (pixels.cpu() / 255 - torch.tensor(mean)) / torch.tensor(deviation)
            sizes = [normal.shape[:2]]
            with torch.inference_mode():
                patches = self.model.vision_tower(normal.permute(2, 0, 1)[None], sizes).last_hidden_state
                return [self.model.multi_modal_projector(patches[0], sizes)]
        if isinstance(self.model, Gemma3Model):
            normal = (pixels.cpu() / 255 - torch.tensor(mean)) / torch.tensor(deviation)
            with torch.inference_mode():
                return [self.model.get_image_features(normal.permute(2, 0, 1)[None]).pooler_output[0]]
        if isinstance(self.model, Gemma4Model):
            from_0 = ((pixels.cpu() / 255 - torch.tensor(mean)) / torch.tensor(deviation) + 1) / 2
            patch = self.raw["vision_config"]["patch_size"]
            patches = torch.from_numpy(convert_image_to_patches(from_0.permute(2, 0, 1).numpy(), patch))
            rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
            places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
            with torch.inference_mode():
                return [self.model.get_image_features(patches[None], places[None]).pooler_output[0]]
        if isinstance(self.model, InternVLModel):
            normal = (pixels.cpu() / 255 - torch.tensor(mean)) / torch.tensor(deviation)
            tiles = normal.permute(2, 0, 1).unflatten(1, (-1, normal.shape[1])).transpose(0, 1)
            with torch.inference_mode():
                return [self.model.get_image_features(tiles).pooler_output.flatten(0, 1)]
        image = Image.fromarray(pixels.cpu().numpy())
        config = self.model.config
        prepare = Qwen2VLImageProcessorPil(
            patch_size=config.patch_size, merge_size=config.spatial_merge_size, min_pixels=1, max_pixels=10**8,
            temporal_patch_size=config.temporal_patch_size, image_mean=list(mean), image_std=list(deviation),
        )  # fmt: skip
        inputs = prepare(image, return_tensors="pt")
        with torch.inference_mode():
            out = self.model(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        return [out.pooler_output, *getattr(out, "deepstack_features", [])]


def make_tower(folder: Path, kind: str, *, seed: int = 0, base: str = "model.", **sizes: Any) -> Tower:
    """`base`: what all names begin with; `sizes`: other ones than the usual."""
    config_class, model_class, usual = KINDS[kind]
    own = {**usual, **sizes}
    if kind in _INSIDE:
        text = {**_TEXT, "vocab_size": 3, "num_hidden_layers": 1, "intermediate_size": 8, "num_attention_heads": 2}
        tower, text["model_type"] = _INSIDE[kind]
        text |= {"hidden_size_per_layer_input": 0} if kind.startswith("gemma4") else {}
        shared = {name: own.pop(name) for name in _OF_WHOLE if name in own}
        config = config_class(vision_config={"model_type": tower, **own}, text_config=text, **shared)
    else:
        config = config_class(**own)
    model = model_class._from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        spread = torch.randn(parameter.shape, generator=generator)
        parameter.data = spread / spread[0].numel() ** 0.5 if spread.ndim > 1 else parameter.data + spread * 0.1
    for name, parameter in model.named_parameters():
        if kind.startswith("gemma4") and name.endswith("self_attn.q_norm.weight"):
            parameter.data *= len(parameter) ** -0.5  # its scores are not divided
    for name, buffer in model.named_buffers():
        if name.startswith("vision_tower.std_"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3 + 1)
        elif name.endswith(("put_min", "put_max")):
            buffer.fill_((0.4 + torch.rand((), generator=generator)) * (-1 if name.endswith("min") else 1))
    raw, prefix, tensors = {"model_type": kind, "vision_config": config.to_dict()}, f"{base}visual.", model.state_dict()
    if kind in _INSIDE:
        raw, prefix = config.to_dict(), base
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("language_model.")}
    else:
        raw["text_config"] = {"hidden_size": OUT}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_tensors(folder, {f"{prefix}{name}": tensor for name, tensor in tensors.items()})
    return Tower(folder, raw, model)


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """And one of the language model's."""
    own = {"model.embed_tokens.weight": torch.zeros(3, OUT)}
    save_file({name: tensor.contiguous() for name, tensor in {**tensors, **own}.items()}, folder / "model.safetensors")


def picture(rows: int, columns: int, patch: int, seed: int = 7) -> Tensor:
    """Of so many patches."""
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * patch, columns * patch, 3), dtype=np.uint8)
    return torch.from_numpy(pixels)
