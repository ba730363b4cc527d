"""Other weights in the places of those there are: to the bit what a start makes of them, whatever the family and
however a rank keeps them.

What has no place there: test_model_weights_without_place.py. Whole engines: test_engine_update_weights.py,
test_engine_weights_in_place.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapter_folders import make_adapter
from checkpoints import make_checkpoint
from classifiers import classifier
from converted import convert
from covering import long
from eagle_layers import eagle_checkpoint
from families import FAMILIES
from guessing_layers import GUESSING, guessing_checkpoint
from mxfp4_checkpoints import in_mxfp4
from quantized_checkpoints import Way, awq, fp8, quantized
from tercet.model.checkpoint import open_model
from tercet.model.guess_head import in_fp8
from tercet.model.load import load_decoder, load_into, open_for, with_guesser
from tercet.model.other_weights import Rank, exchange_weights
from tercet.model.parallel import Group
from tercet.model.rank_weights import GuesserWeights, LayerWeights, Weights
from tercet.model.rounded_checkpoint import RoundedCheckpoint
from tercet.model.rounded_rows import with_rounded_rows
from tercet.model.weights import Checkpoint, ScaledCheckpoint, load_weights
from tercet.triton_kernels.scaled_weight import ScaledWeight
from test_model_quantized import FAMILIES as QUANTIZED_FAMILIES
from test_model_quantized import WAYS

CPU = torch.device("cpu")
Make = Callable[[Path, int], Path]
"""A checkpoint in this folder, of this seed."""
FP8 = Way({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8(128, 128))
FP8_ROWS = Way({"quant_method": "fbgemm_fp8"}, fp8(1, 0, "weight_scale"))
AWQ = Way({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, awq(64))
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
LATENTS: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "v_head_dim": 32,
}
FEW = ("llama-bias-tied", "qwen3-moe", "nemotron-h")
"""That stand for all in the short suite."""


def of_family(family: str, **sizes: Any) -> Make:
    return lambda folder, seed: make_checkpoint(family, folder, seed, **sizes)


def in_way(family: str, way: Way, **sizes: Any) -> Make:
    return lambda folder, seed: quantized(make_checkpoint(family, folder / "all", seed, **sizes), way, folder, seed)[0]


def in_gguf(family: str, kind: GGMLQuantizationType) -> Make:
    def make(folder: Path, seed: int) -> Path:
        convert(make_checkpoint(family, folder, seed), folder / "model.gguf", kind)
        return folder / "model.gguf"

    return make


def of_experts_in_four_bits(folder: Path, seed: int) -> Path:
    return in_mxfp4(make_checkpoint("gpt-oss", folder / "all", seed), folder)[0]


def of_classifier(folder: Path, seed: int) -> Path:
    classifier("qwen3", folder, seed, num_labels=3)
    return folder


def with_both(folder: Path, seed: int, *, equal: bool) -> Path:
    """Embedding and head, though config.json ties them."""
    path = make_checkpoint("qwen3", folder, seed)
    tensors = load_file(path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] + (0 if equal else 1)
    save_file({**tensors, "lm_head.weight": head}, path / "model.safetensors", {"format": "pt"})
    return path


def both(make: Make, folder: Path) -> tuple[Path, Path]:
    return make(folder / "first", 0), make(folder / "other", 1)


def tensors_in(what: object, seen: dict[int, object] | None = None) -> Iterator[Tensor]:
    """All that can be reached, each once."""
    seen = {} if seen is None else seen
    if id(what) in seen:
        return
    seen[id(what)] = what  # and so stays: numbers of those that go are others' again
    match what:
        case Tensor():
            yield what
        case tuple() | list():
            for one in what:
                yield from tensors_in(one, seen)
        case dict():
            yield from tensors_in(list(what.values()), seen)
        case _ if type(what).__module__.startswith("tercet.") and hasattr(what, "__dict__"):
            yield from tensors_in(list(vars(what).values()), seen)


def bits(tensor: Tensor) -> Tensor:
    """Of its numbers: one that is none is itself, too."""
    plain = tensor.to_dense() if tensor.is_mkldnn else tensor
    return plain.contiguous().view(torch.uint8) if plain.ndim else plain


def check_same(got: object, wanted: object) -> None:
    ours, theirs = list(tensors_in(got)), list(tensors_in(wanted))
    assert len(ours) == len(theirs) > 5
    for one, other in zip(ours, theirs, strict=True):
        assert (one.dtype, one.shape, one.is_mkldnn) == (other.dtype, other.shape, other.is_mkldnn)
        assert torch.equal(bits(one), bits(other))


def parts_of(layer: LayerWeights) -> Iterator[object]:
    yield from vars(layer).values()
    if layer.mlp is not None:
        yield from vars(layer.mlp).values()


def addresses(what: object) -> list[int]:
    return [id(tensor) if tensor.is_mkldnn else tensor.data_ptr() for tensor in tensors_in(what)]


ON_A_CPU: dict[str, tuple[Make, dict[str, Any]]] = {
    **{family: (of_family(family), {}) for family in FAMILIES},
    **{way: (in_way(QUANTIZED_FAMILIES[way], WAYS[way]), {}) for way in WAYS},
    **{f"{family} guesses": (partial(guessing_checkpoint, family), {"guesses": True}) for family in GUESSING},
    "float16": (of_family("qwen3"), {"dtype": "float16"}),
    "bfloat16": (of_family("glm4-moe"), {"dtype": "bfloat16"}),
    "rounded": (of_family("phi3"), {"quantization": "fp8"}),
    "gguf": (in_gguf("llama", GGMLQuantizationType.Q8_0), {}),
    "gguf, experts": (in_gguf("mixtral", GGMLQuantizationType.F16), {}),
    "mxfp4": (of_experts_in_four_bits, {}),
    "classifier": (of_classifier, {}),
    "by tokens": (of_family("llama"), {"label_tokens": ["a", "b"]}),
    "both, equal": (partial(with_both, equal=True), {}),
    "both, equal, float16": (partial(with_both, equal=True), {"dtype": "float16"}),
    "both": (partial(with_both, equal=False), {}),
}


@pytest.mark.parametrize("case", [one if one in (*FEW, "gguf", "both") else long(one) for one in ON_A_CPU])
def test_a_cpu_has_what_a_start_makes(case: str, tmp_path: Path) -> None:
    """All that a decoder can reach, and in the tensors it had."""
    make, options = ON_A_CPU[case]
    first, other = both(make, tmp_path)
    opened = partial(open_for, device=CPU, **options)
    ways: dict[str, Any] = {"guesses": options.get("guesses", False)}
    got = load_decoder(opened(first), Group.single(CPU), **ways)
    before = addresses(got)
    load_into(got, opened(other, like=first))
    assert addresses(got) == before
    check_same(got, load_decoder(opened(other, like=first), Group.single(CPU), **ways))


def test_what_belongs_to_others_stays(tmp_path: Path) -> None:
    """Adapters, and a layer that guesses from another checkpoint."""
    first, other = both(of_family("llama", num_hidden_layers=8), tmp_path)
    options: dict[str, Any] = {
        "adapters": [make_adapter(tmp_path / "adapter", first, 3)],
        "eagle": eagle_checkpoint(first, tmp_path / "eagle"),
    }
    decoder = load_decoder(open_for(first, CPU, **options), Group.single(CPU), guesses=True)
    load_into(decoder, open_for(other, CPU, **options, like=first))
    check_same(decoder, load_decoder(open_for(other, CPU, **options, like=first), Group.single(CPU), guesses=True))


def as_it_is(weights: Weights) -> Weights:
    return weights


def rounds_head(weights: Weights) -> Weights:
    """What `with_guess_head` does on a GPU."""
    assert isinstance(weights.guesser, GuesserWeights)
    return replace(weights, guesser=replace(weights.guesser, head_VD=in_fp8(weights.lm_head_VD)))


ON_A_GPU: dict[str, tuple[Make, Callable[[Weights], Weights]]] = {
    **{family: (of_family(family), as_it_is) for family in FAMILIES},
    **{family: (partial(guessing_checkpoint, family), rounds_head) for family in GUESSING},
    "fp8": (in_way("qwen3", FP8, **SIZES), as_it_is),
    "fp8, tiles": (in_way("qwen3", FP8, **SIZES, num_key_value_heads=4), with_rounded_rows),
    "fp8, tiles of rows": (in_way("qwen3", FP8_ROWS, **SIZES), with_rounded_rows),
    "fp8, experts": (in_way("qwen3-moe", FP8, **SIZES, moe_intermediate_size=256), with_rounded_rows),
    "fp8, states": (in_way("qwen3.5", FP8, **SIZES), as_it_is),
    "fp8, latents": (in_way("youtu", FP8, **LATENTS), as_it_is),
    "awq": (in_way("qwen3", AWQ, **SIZES), as_it_is),
    "awq, experts": (in_way("qwen3-moe", AWQ, **SIZES, moe_intermediate_size=256), as_it_is),
    "awq, latents": (in_way("youtu", AWQ, **LATENTS), as_it_is),
    "rounded": (of_family("llama", **SIZES), with_rounded_rows),
    "mxfp4": (of_experts_in_four_bits, as_it_is),
    "classifier": (of_classifier, as_it_is),
    "gguf": (in_gguf("llama", GGMLQuantizationType.Q8_0), as_it_is),
    "both, equal": (partial(with_both, equal=True), as_it_is),
    "both": (partial(with_both, equal=False), as_it_is),
}
SHORT = ("qwen3-moe", "deepseek-v3", "fp8, tiles", "awq")


def opened_as_stored(path: Path, case: str) -> tuple[Any, Checkpoint, Any]:
    """And what of it is kept so."""
    config, tensors = open_model(path)
    if case == "rounded":
        tensors = RoundedCheckpoint(tensors, CPU)
    if case in GUESSING:
        config = with_guesser(config)
    return config, tensors, tensors.stored_as() if isinstance(tensors, ScaledCheckpoint) else {}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", [one if one in SHORT else long(one) for one in ON_A_GPU])
def test_a_gpu_has_what_a_start_makes(case: str, size: int, tmp_path: Path) -> None:
    """In bfloat16, as stored where it may be so, gates and what they multiply in turns; on the last rank."""
    make, finish = ON_A_GPU[case]
    first, other = both(make, tmp_path)
    where: dict[str, Any] = {"rank": size - 1, "size": size, "dtype": torch.bfloat16, "device": CPU}

    def made(path: Path) -> Weights:
        config, tensors, kept = opened_as_stored(path, case)
        return finish(load_weights(tensors, config, **where, kept=kept, interleaved=True))

    got = made(first)
    is_kept = case.startswith(("fp8", "awq", "rounded", "mxfp4"))
    assert is_kept == any(isinstance(one, ScaledWeight) for layer in got.layers for one in parts_of(layer))
    before = addresses(got)
    config, tensors, kept = opened_as_stored(other, case)
    exchange_weights(got, tensors, config, Rank(**where, kept=kept), finish)
    assert addresses(got) == before
    check_same(got, made(other))
