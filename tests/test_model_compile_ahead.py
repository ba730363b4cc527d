"""What is compiled ahead: all kernels of all kinds of steps, in parts that share them, sums over ranks among them."""

import itertools
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import checkpoint, make_checkpoint
from covering import long
from eagle_layers import eagle_checkpoint
from guessing_layers import guessing_checkpoint
from seeing_models import seeing
from tercet.model import compile_ahead as module
from tercet.model.adapters import Ranks
from tercet.model.cache_tables import one_table
from tercet.model.checkpoint import read_config
from tercet.model.compile_ahead import Claims, Steps, compile_ahead, fingerprint, launch_all
from tercet.model.config_json import read_config_json
from tercet.model.eagle_config import parse_eagle
from tercet.model.padded_shapes import Shapes
from tercet.model.runner_settings import GuessSettings
from tercet.model.scaled_rows import StoredAs
from tercet.model.step_shape import StepShape
from tercet.model.trial_shapes import TrialShapes
from tercet.model.vision_reader import read_vision_config
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED, Gpu

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")
GPU = Gpu("NVIDIA H200", 90, 132)
IN_LAYER = [f"self_attn.{name}_proj.weight" for name in "qkvo"]


def steps_of(family: str, **changes: Any) -> Steps:
    """Few."""
    config = read_config(checkpoint(family))
    few: dict[str, Any] = {
        "tensor_parallel_size": 1,
        "dtype": torch.bfloat16,
        "cache_dtype": torch.bfloat16,
        "max_model_len": config.max_position_embeddings,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 64,
        "page_size": 64,
        "deterministic": False,
        "kept": {},
        "guesses": None,
        "adapters": None,
        "eagle": None,
        "rounds_rows": False,
        "num_landings": 16,
        "tables": one_table(config),
    }
    return Steps(config=config, **{**few, **changes})


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


class Few(Claims):
    """A slow process: it claims a third."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(folder)
        self._number = number

    def __call__(self, what: str) -> bool:
        return zlib.crc32(what.encode()) % 3 == self._number and super().__call__(what)


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("ranks", [long(1), long(2)])
def test_parts_are_the_whole(tmp_path: Path, ranks: int) -> None:
    steps = steps_of("qwen3", tensor_parallel_size=ranks)
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    whole = compile_ahead(steps, GPU, Claims(alone))
    assert whole > 20
    assert compile_ahead(steps, GPU, Claims(alone)) == 0
    parts = [compile_ahead(steps, GPU, Few(together, number)) for number in (1, 2)]
    parts.append(compile_ahead(steps, GPU, Claims(together)))
    assert sum(parts) == whole
    assert min(parts) > 0


def test_a_layer_of_each_kind_stands_for_all() -> None:
    few, _ = module._few_layers(read_config(checkpoint("qwen3-moe")), {})  # experts, one MLP, experts
    assert few.experts is not None
    assert (few.num_layers, few.experts.layers) == (3, {0, 2})
    few, _ = module._few_layers(read_config(checkpoint("mixtral")), {})
    assert few.experts is not None
    assert (few.num_layers, few.layer_windows, few.experts.layers) == (2, (16, 16), {0, 1})
    few, _ = module._few_layers(read_config(checkpoint("gemma2")), {})
    assert few.layer_windows == (12, 0, 12)


def test_a_layer_kept_as_stored_is_one_of_another_kind() -> None:
    """Whatever the order in which files name what is in it."""
    names = [f"model.layers.{layer}.{matrix}" for layer in (0, 2) for matrix in IN_LAYER]
    config = replace(read_config(checkpoint("llama")), num_layers=4, layer_windows=(), layer_ropes=(), layer_heads=())
    stored = dict.fromkeys([*names[:4], *names[:3:-1], "lm_head.weight"], StoredAs(8, 32, torch.float32))
    few, kept = module._few_layers(config, stored)
    assert few.num_layers == 3
    assert set(kept) == set(names[:4])


def test_a_claim_stays_its_own(tmp_path: Path) -> None:
    """A kernel may be launched with numbers that make it another one, and nobody else compiles that."""
    first, second = Claims(tmp_path), Claims(tmp_path)
    for _ in range(2):
        assert first("a")
        assert not second("a")
        assert second("b/*")
        assert not first("b/*")


def launches(steps: Steps, rank: int = 0) -> set[str]:
    """What makes each kernel another one."""
    seen = set[str]()

    def claim(what: str) -> bool:
        seen.add(what)
        return False

    with torch.inference_mode(), compiling_for(GPU, claim):
        launch_all(steps, rank)
    return seen


def test_steps_with_guesses_use_no_others_whatever_their_rows_want(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where few requests may run, those that try tokens have more rows than any other."""
    guesses = GuessSettings(num_guesses=7, looked_up=(1, 4), most_slots=4)
    steps = steps_of("qwen3", max_num_seqs=4, guesses=guesses)
    ahead, trials = launches(steps), TrialShapes(guesses)
    kinds = list(itertools.product((1, 2, 4), *[(False, True)] * 3))
    monkeypatch.setattr(Shapes, "for_compilers", lambda self: [trials.exact(*kind) for kind in kinds])
    assert launches(steps) <= ahead


@pytest.mark.parametrize("kind", ["gemma3", long("qwen3-vl"), long("internvl"), long("glm4v"), long("glm4v-moe")])
def test_steps_with_images_use_no_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many chunks and tokens come beside them."""
    folder = seeing(kind, large=True).folder
    steps = steps_of("llama", max_num_seqs=512, max_num_batched_tokens=8192, max_model_len=8192, most_image_tokens=16)
    steps = replace(steps, config=read_config(folder), vision=read_vision_config(folder, read_config_json(folder)))
    ahead, for_graphs = launches(steps), Shapes.for_graphs

    def with_images(shapes: Shapes) -> list[StepShape]:
        return [shape._replace(with_images=True) for shape in for_graphs(shapes) if shape.num_chunks]

    monkeypatch.setattr(Shapes, "for_compilers", with_images)
    assert launches(steps) <= ahead


def test_steps_of_layers_of_several_sizes_use_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = launches(steps := steps_of("gemma4-told", max_num_seqs=20, max_num_batched_tokens=256))
    monkeypatch.setattr(module, "_few_layers", lambda config, kept: (config, kept))
    monkeypatch.setattr(Shapes, "for_compilers", lambda self: self.for_graphs())
    assert launches(steps) <= ahead


def with_real_heads(steps: Steps) -> Steps:
    """Of layers that carry states, as GPUs know them."""
    assert steps.config.carried is not None
    carried = replace(steps.config.carried, key_dim=128, value_dim=128)
    return replace(steps, config=replace(steps.config, carried=carried))


@pytest.mark.parametrize("deterministic", [False, long(True)])
def test_steps_with_guesses_of_models_with_states(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds, and what moves states on; of all sizes."""
    guesses = GuessSettings(num_guesses=7, looked_up=(1, 4), most_slots=16)
    bare = with_real_heads(steps_of("qwen3.5", max_num_seqs=16, deterministic=deterministic))
    steps = replace(bare, guesses=guesses)
    tried = "_tried_prologue", "_delta_tried", "_settle_states", "_settle_tails"
    ahead, trials = launches(steps), TrialShapes(guesses)
    # The prologue is another kernel for few tokens; none is for other layers or sizes.
    assert [sum(what.startswith(name) for what in ahead) for name in tried] == [2, 1, 1, 1]
    assert not any(what.startswith(tried) for what in launches(bare))
    monkeypatch.setattr(Shapes, "for_compilers", lambda self: [trials.exact(size, True, True) for size in range(1, 17)])
    assert launches(steps) <= ahead


@pytest.mark.parametrize(
    ("deterministic", "kind"),
    [*itertools.product((False, True), ("own", "own in FP8")), (False, "eagle3"), long(True, "eagle3")],
)
def test_steps_whose_end_guesses_use_no_others(
    deterministic: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all sizes that graphs may have, and with any number of slots that are tried."""
    guesses = GuessSettings(num_guesses=2, looked_up=None, most_slots=16)
    sizes = {"max_num_seqs": 20, "max_num_batched_tokens": 128, "deterministic": deterministic, "guesses": guesses}
    large: dict[str, int] = {"vocab_size": 248_320, "hidden_size": 4096} if kind == "own in FP8" else {}
    if kind == "eagle3":
        config = read_config(path := make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=7))
        other = parse_eagle(read_config_json(eagle_checkpoint(path, tmp_path / "eagle")), config)
        steps = replace(steps_of("qwen3", **sizes, eagle=other), config=replace(config, guesses=True))
    else:
        config = replace(read_config(guessing_checkpoint("deepseek-v3", tmp_path)), guesses=True, **large)
        steps = replace(steps_of("deepseek-v3", **sizes), config=config)
    ahead, trials = launches(steps), TrialShapes(guesses)
    assert any("_spread_logits" in what for what in ahead) == (kind == "eagle3")
    assert any("_join_normed" in what for what in ahead)
    of_head = {what.split()[0] for what in ahead if f"('N', {config.vocab_size})" in what}
    in_fp8 = {"scaled_kernel"} if deterministic else {"scaled_kernel", "vector_scaled_kernel"}
    assert {name for name in of_head if "scaled" in name} == (in_fp8 if large else set())
    assert not large or of_head > in_fp8  # the model's tokens are drawn by its own
    tried = [trials.exact(size, whole_logits) for size in range(1, 17) for whole_logits in (False, True)]
    monkeypatch.setattr(Shapes, "for_compilers", lambda self: [*self.for_graphs(), *tried])
    assert launches(steps) <= ahead


@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_with_adapters_use_no_others(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all sizes, and those without any keep theirs, but in deterministic mode, where there are none."""
    ranks = Ranks(3, {"self_attn.q_proj": 8, "mlp.down_proj": 20})
    sizes = {"max_num_seqs": 80, "max_num_batched_tokens": 2048, "deterministic": deterministic}
    bare, adapted = launches(steps_of("qwen3", **sizes)), launches(steps_of("qwen3", adapters=ranks, **sizes))
    low_rank = {what for what in adapted if "_shrink_kernel" in what or "_expand_kernel" in what}
    assert len(low_rank) == (4 if deterministic else 8)  # two kernels of two products, in low tiles and in high ones
    assert not any("_shrink" in what for what in bare)
    assert deterministic or bare <= adapted
    sizes_of_rows = [(1, 0, 0), (33, 0, 0), (80, 0, 0), (0, 1, 5), (7, 3, 700), (60, 40, 2048)]
    monkeypatch.setattr(
        Shapes, "for_compilers", lambda self: [self.fit(*each)._replace(adapted=True) for each in sizes_of_rows]
    )
    assert launches(steps_of("qwen3", adapters=ranks, **sizes)) <= adapted


def test_steps_with_adapters_of_all_kinds_of_layers_use_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models of which some carry states."""
    ranks = Ranks(3, {"self_attn.q_proj": 8, "linear_attn.in_proj_b": 20, "linear_attn.out_proj": 3})
    steps = with_real_heads(steps_of("qwen3.5", adapters=ranks, max_num_seqs=20, max_num_batched_tokens=256))
    ahead = launches(steps)
    assert {"_expand_kernel", "_expand_row_kernel"} <= {what.split()[0] for what in ahead}
    monkeypatch.setattr(Shapes, "for_compilers", lambda self: self.for_graphs())
    assert launches(steps) <= ahead


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("way", "numbers"), [(StoredAs(8, 64, torch.float32), "float8"), (StoredAs(4, 64, torch.bfloat16), "uint8")]
)
def test_products_read_what_is_kept_as_stored(way: StoredAs, numbers: str, rank: int) -> None:
    config = replace(read_config(checkpoint("qwen3")), hidden_size=128)
    steps = replace(steps_of("qwen3"), config=config, tensor_parallel_size=2)
    without = launches(steps, rank)
    kept = {f"model.layers.{layer}.{matrix}": way for layer in range(3) for matrix in IN_LAYER}
    assert any(numbers in what for what in launches(replace(steps, kept=kept), rank) - without)
    assert not any(numbers in what and "matmul" in what for what in without)


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("others", [False, long(True)], ids=["sums", "all"])
def test_sums_over_ranks_are_among_them(dtype: torch.dtype, others: bool) -> None:
    """Of few rows, of more, and of long steps. `others` are launched in any case, and may be compiled beside them."""
    steps = steps_of("qwen3", tensor_parallel_size=2, max_num_batched_tokens=4096, dtype=dtype, cache_dtype=dtype)
    launched: list[set[str]] = [set(), set()]
    hashes: list[set[str]] = []
    wanted = {"_all_reduce_add_rms_norm_kernel", "_all_reduce_rows_add_rms_norm_kernel", "_add_arrived_kernel"}
    for rank, names in enumerate(launched):

        def claim(what: str, names: set[str] = names) -> bool:
            name = what.split()[0]
            names.add(name)
            return others or name in wanted

        with torch.inference_mode(), compiling_for(GPU, claim) as kernels:
            launch_all(steps, rank)
        assert wanted <= {kernel.name for kernel in kernels}
        hashes.append({kernel.hash for kernel in kernels})
    assert launched[0] == launched[1]
    assert hashes[0] != hashes[1]


def test_what_decides_which_kernels_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of("qwen3")
    kept = {"kept": {"a": StoredAs(8, 64, torch.float32)}}
    changes = {"deterministic": True}, {"page_size": 32}, {"cache_dtype": FP8}, kept
    prints = {
        fingerprint(one, gpu)
        for one in (steps, steps_of("llama"), *(steps_of("qwen3", **change) for change in changes))
        for gpu in (GPU, Gpu("NVIDIA H200", 90, 114))
    }
    assert len(prints) == 6 * 2
    assert fingerprint(steps_of("qwen3"), GPU) in prints
    monkeypatch.setattr(module.triton, "__version__", "0")
    assert fingerprint(steps, GPU) not in prints
