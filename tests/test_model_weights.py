"""The reading of weights: all of them, piece by piece, and a clear word on files that do not fit the model."""

import json
import os
import shutil
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpoints import checkpoint
from loaded_weights import CPU, load, tensors_of
from tercet.model import safetensors_files
from tercet.model.checkpoint import open_model, read_config
from tercet.model.dummy import DummyCheckpoint
from tercet.model.rank_weights import Weights
from tercet.model.reordered import reordered_for_cpu
from tercet.model.weights import load_weights
from weight_sizes import num_in_matrices


def copy_of(family: str, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    path = Path(shutil.copytree(checkpoint(family), folder / "model"))
    return path, load_file(path / "model.safetensors")


def test_sharded_files_hold_the_same(tmp_path: Path) -> None:
    path = checkpoint("qwen3")
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    single, sharded = load(path), load(tmp_path)
    assert torch.equal(single.embedding_VD, sharded.embedding_VD)
    for ours, theirs in zip(single.layers, sharded.layers, strict=True):
        assert torch.equal(ours.qkv_ND, theirs.qkv_ND)
        assert torch.equal(ours.o_DQ, theirs.o_DQ)
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ValueError, match=f"files that are not there: {victim.name}"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret"}}')
    with pytest.raises(ValueError, match="weight_map must map"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "%s"}}' % ("x" * 300))
    with pytest.raises(ValueError, match="files that are not there: xxx"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(r'{"weight_map": {"a": "\ud800\n"}}')
    with pytest.raises(ValueError, match=r"not there: '\\ud800\\n'$"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[" * 10_000)
    with pytest.raises(ValueError, match="is not a readable index: RecursionError"):
        load(tmp_path)


def test_type_is_converted() -> None:
    path = checkpoint("llama")
    assert torch.equal(load(path, dtype=torch.bfloat16).layers[0].qkv_ND, load(path).layers[0].qkv_ND.bfloat16())


def test_progress_counts_bytes_of_this_rank() -> None:
    config, tensors = open_model(checkpoint("llama"))
    seen: list[tuple[int, int]] = []
    arguments = {"rank": 1, "size": 2, "dtype": torch.float32, "device": CPU}
    load_weights(tensors, config, **arguments, progress=lambda done, total: seen.append((done, total)))
    done, total = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert set(total) == {done[-1]}
    # The padding row of the vocabulary is not read; norms (7 x 64 numbers) are no matrices.
    assert done[-1] == 4 * (num_in_matrices(config, 2) - 2 * 64 + 7 * 64)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.self_attn.k_proj.weight", "lm_head.weight"])
def test_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    path, raw = copy_of("llama", tmp_path)
    del raw[name]
    save_file(raw, path / "model.safetensors")
    with pytest.raises(ValueError, match=f"missing: {name}"):
        load(path)


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight"])
def test_surplus_tensor_is_named(name: str, tmp_path: Path) -> None:
    path, raw = copy_of("llama", tmp_path)
    save_file({**raw, name: torch.ones(16)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=f"not part of this model: {name}"):
        load(path)


def test_misshapen_tensor_is_named(tmp_path: Path) -> None:
    path, raw = copy_of("llama", tmp_path)
    save_file({**raw, "model.layers.0.mlp.up_proj.weight": torch.ones(96, 63)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"up_proj.weight \[96, 63\] \(want \[96, 64\]\)"):
        load(path)


def test_rotary_frequencies_of_old_files_are_not_surplus(tmp_path: Path) -> None:
    path, raw = copy_of("llama", tmp_path)
    save_file({**raw, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, path / "model.safetensors")
    assert torch.equal(load(path).embedding_VD, raw["model.embed_tokens.weight"])


@pytest.mark.parametrize("equal", [True, False])
def test_tied_by_config_yet_both_in_the_file(equal: bool, tmp_path: Path) -> None:
    path, raw = copy_of("qwen3", tmp_path)
    head = raw["model.embed_tokens.weight"].clone() + (0 if equal else 1)
    save_file({**raw, "lm_head.weight": head}, path / "model.safetensors", metadata={"format": "pt"})
    weights = load(path)
    assert (weights.lm_head_VD is weights.embedding_VD) == equal
    assert torch.equal(weights.lm_head_VD, head)
    # What transformers does with such a file is the measure.
    theirs = AutoModelForCausalLM.from_pretrained(path).lm_head.weight
    assert torch.equal(weights.lm_head_VD, theirs)


@pytest.mark.parametrize("keep", [0, 7, 100, 20_000])
def test_truncated_file(keep: int, tmp_path: Path) -> None:
    path, _ = copy_of("llama", tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated or not a readable safetensors file"):
        load(path)


@pytest.mark.parametrize(("family", "size"), [("qwen2", 1), ("qwen2", 2), ("qwen3-moe", 2)])
def test_weights_come_piece_by_piece(family: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(family)
    for fused in (False, True):
        at_once = [load(path, rank, size, fused=fused) for rank in range(size)]
        for num_bytes in (1, 1000):  # row by row, and some rows at a time
            with monkeypatch.context() as patch:
                patch.setattr(safetensors_files, "_PIECE_BYTES", num_bytes)
                for rank, whole in enumerate(at_once):
                    pieces = load(path, rank, size, fused=fused)
                    assert torch.equal(pieces.embedding_VD, whole.embedding_VD)
                    assert torch.equal(pieces.lm_head_VD, whole.lm_head_VD)
                    for got, wanted in zip(pieces.layers, whole.layers, strict=True):
                        pairs = zip(tensors_of(got), tensors_of(wanted), strict=True)
                        assert all(torch.equal(*pair) for pair in pairs)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path, _ = copy_of("llama", tmp_path)
    config, tensors = open_model(path)
    os.truncate(path / "model.safetensors", 5000)
    with pytest.raises(ValueError, match=r"model.safetensors is shorter than it was when it was opened"):
        load_weights(tensors, config, rank=0, size=1, dtype=torch.float32, device=CPU)


def test_no_memory_is_taken_for_sizes_that_the_files_do_not_have(tmp_path: Path) -> None:
    path, _ = copy_of("llama", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "intermediate_size": 2**20, "hidden_size": 2**20}))
    with pytest.raises(
        ValueError, match=r"of the wrong shape: model\.embed_tokens\.weight \[419, 64\] \(want \[419, 10"
    ):
        load(path)


def test_random_bytes_are_no_file(tmp_path: Path) -> None:
    path, _ = copy_of("llama", tmp_path)
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 50)
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load(path)


def test_tensors_whose_names_are_no_line(tmp_path: Path) -> None:
    path, raw = copy_of("llama", tmp_path)
    save_file({**raw, "a\nb": torch.zeros(3)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"not part of this model: 'a\\nb'$"):
        load(path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    path, _ = copy_of("llama", tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no .safetensors file; weights are read from safetensors or GGUF only"):
        load(path)


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    path, raw = copy_of("llama", tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**raw, name: raw[name].to(torch.float8_e4m3fn)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} is of type F8_E4M3"):
        load(path)


@pytest.mark.parametrize("family", ["llama", "llama-bias-tied"])
def test_reordering_for_the_cpu_holds_no_matrix_twice(family: str) -> None:
    weights, kept = load(checkpoint(family)), load(checkpoint(family))
    reordered = reordered_for_cpu(weights)
    matrices = [attrgetter(name) for name in ("qkv_ND", "o_DQ", "mlp.gate_up_2FD", "mlp.down_DF")]
    for before, after, plain in zip(weights.layers, reordered.layers, kept.layers, strict=True):
        for matrix in matrices:
            assert matrix(before).untyped_storage().nbytes() == 0
            assert torch.equal(matrix(after).to_dense(), matrix(plain))
        assert torch.equal(after.input_norm_D, plain.input_norm_D)
    tied = weights.lm_head_VD is weights.embedding_VD
    assert (weights.lm_head_VD.untyped_storage().nbytes() > 0) == tied
    assert torch.equal(reordered.lm_head_VD.to_dense(), kept.lm_head_VD)
    assert torch.equal(reordered.embedding_VD, kept.embedding_VD)


def test_reordering_experts_for_the_cpu_holds_no_matrix_twice() -> None:
    weights, kept = load(checkpoint("qwen2-moe")), load(checkpoint("qwen2-moe"))
    before, after, plain = (each.layers[1].mlp for each in (weights, reordered_for_cpu(weights), kept))
    for matrix in map(attrgetter, ("router_LD", "gate_up_E2FD", "down_EDF")):
        assert matrix(before).untyped_storage().nbytes() == 0
    assert torch.equal(after.router_LD.to_dense(), plain.router_LD)
    for matrices in map(attrgetter, ("gate_up_E2FD", "down_EDF")):
        each = [matrix.to_dense() for matrix in matrices(after).matrices_NK]
        assert torch.equal(torch.stack(each), matrices(plain))


def test_dummy_weights_do_not_depend_on_ranks() -> None:
    config = read_config(checkpoint("qwen3"))

    def make(seed: int, rank: int, size: int) -> Weights:
        dummy = DummyCheckpoint(config, seed, torch.float32, CPU)
        return load_weights(dummy, config, rank=rank, size=size, dtype=torch.float32, device=CPU)

    whole, ranks = make(1, 0, 1), [make(1, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([rank.layers[0].o_DQ for rank in ranks], 1), whole.layers[0].o_DQ)
    assert torch.equal(torch.cat([rank.embedding_VD for rank in ranks])[:419], whole.embedding_VD)
    assert not torch.equal(whole.layers[0].o_DQ, whole.layers[1].o_DQ)
    assert not torch.equal(whole.layers[0].o_DQ, make(2, 0, 1).layers[0].o_DQ)
    assert torch.equal(whole.final_norm_D, torch.ones(64))
    assert 0.015 < whole.embedding_VD.std() < 0.025
