"""A rank's weights: the right slices of the right tensors in the right places."""

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import checkpoint
from loaded_weights import load
from tercet.model.checkpoint import read_config
from tercet.model.rank_weights import ExpertWeights, MlpWeights


@pytest.mark.parametrize("family", ["llama-bias-tied", "qwen2", "qwen3", "llama-mha-head-dim"])
def test_whole_model(family: str) -> None:
    path = checkpoint(family)
    raw, weights = load_file(path / "model.safetensors"), load(path)
    assert torch.equal(weights.embedding_VD, raw["model.embed_tokens.weight"])
    assert torch.equal(weights.final_norm_D, raw["model.norm.weight"])
    if "lm_head.weight" in raw:
        assert torch.equal(weights.lm_head_VD, raw["lm_head.weight"])
    else:
        assert weights.lm_head_VD is weights.embedding_VD
    for index, layer in enumerate(weights.layers):
        part = {name.removeprefix(f"model.layers.{index}."): tensor for name, tensor in raw.items()}
        qkv = [f"self_attn.{name}_proj" for name in "qkv"]
        gate_up = ["mlp.gate_proj", "mlp.up_proj"]
        assert torch.equal(layer.qkv_ND, torch.cat([part[f"{name}.weight"] for name in qkv]))
        assert torch.equal(layer.mlp.gate_up_2FD, torch.cat([part[f"{name}.weight"] for name in gate_up]))
        assert torch.equal(layer.o_DQ, part["self_attn.o_proj.weight"])
        assert torch.equal(layer.mlp.down_DF, part["mlp.down_proj.weight"])
        assert torch.equal(layer.input_norm_D, part["input_layernorm.weight"])
        assert torch.equal(layer.post_norm_D, part["post_attention_layernorm.weight"])
        if family in ("llama-bias-tied", "qwen2"):
            assert layer.qkv_bias_N is not None
            assert torch.equal(layer.qkv_bias_N, torch.cat([part[f"{name}.bias"] for name in qkv]))
        if family == "llama-bias-tied":
            assert layer.mlp.gate_up_bias_2F is not None
            assert layer.o_bias_D is not None
            assert layer.mlp.down_bias_D is not None
            assert torch.equal(layer.mlp.gate_up_bias_2F, torch.cat([part[f"{name}.bias"] for name in gate_up]))
            assert torch.equal(layer.o_bias_D, part["self_attn.o_proj.bias"])
            assert torch.equal(layer.mlp.down_bias_D, part["mlp.down_proj.bias"])
        if family == "qwen3":
            assert layer.q_norm_H is not None
            assert layer.k_norm_H is not None
            assert torch.equal(layer.q_norm_H, part["self_attn.q_norm.weight"])
            assert torch.equal(layer.k_norm_H, part["self_attn.k_norm.weight"])


def test_what_logits_are_divided_by_is_in_the_last_norm() -> None:
    path = checkpoint("granite")
    raw, weights = load_file(path / "model.safetensors"), load(path)
    torch.testing.assert_close(weights.final_norm_D, raw["model.norm.weight"] / 7)
    assert weights.lm_head_VD is weights.embedding_VD
    assert torch.equal(weights.embedding_VD, raw["model.embed_tokens.weight"])


def test_one_is_added_to_the_norms_of_gemma_and_nothing_rounded() -> None:
    path = checkpoint("gemma3")
    raw, weights = load_file(path / "model.safetensors"), load(path, dtype=torch.bfloat16)
    assert torch.equal(weights.final_norm_D, raw["model.norm.weight"] + 1)
    for index, layer in enumerate(weights.layers):
        for ours, theirs in (
            (layer.input_norm_D, "input_layernorm"),
            (layer.o_norm_D, "post_attention_layernorm"),
            (layer.post_norm_D, "pre_feedforward_layernorm"),
            (layer.down_norm_D, "post_feedforward_layernorm"),
            (layer.q_norm_H, "self_attn.q_norm"),
            (layer.k_norm_H, "self_attn.k_norm"),
        ):
            assert ours is not None
            assert torch.equal(ours, raw[f"model.layers.{index}.{theirs}.weight"] + 1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["qwen2", "phi3-long", "glm"])
def test_ranks_together_are_the_whole(family: str, size: int) -> None:
    path = checkpoint(family)  # 4 heads, 2 KV heads, 419 words
    config = read_config(path)
    whole, ranks = load(path), [load(path, rank, size) for rank in range(size)]
    vocabulary = torch.cat([rank.embedding_VD for rank in ranks])
    assert torch.equal(vocabulary[:419], whole.embedding_VD)
    assert vocabulary[419:].count_nonzero() == 0
    queries, kv = 4 * config.head_dim, 2 * config.head_dim
    for index, layer in enumerate(whole.layers):
        parts = [rank.layers[index] for rank in ranks]
        assert torch.equal(torch.cat([part.o_DQ for part in parts], 1), layer.o_DQ)
        assert torch.equal(torch.cat([part.mlp.down_DF for part in parts], 1), layer.mlp.down_DF)
        gate, up = zip(*[part.mlp.gate_up_2FD.chunk(2) for part in parts], strict=True)
        assert torch.equal(torch.cat([*gate, *up]), layer.mlp.gate_up_2FD)
        mine, keys = queries // size, max(config.head_dim, kv // size)
        q, k, v = zip(*[part.qkv_ND.split([mine, keys, keys]) for part in parts], strict=True)
        copies = size // len(range(0, kv, keys))
        assert torch.equal(torch.cat([*q, *k[::copies], *v[::copies]]), layer.qkv_ND)
        for rank in range(size):  # replicas agree
            assert torch.equal(k[rank], k[rank // copies * copies])
        if layer.qkv_bias_N is not None:
            bias = torch.cat([part.qkv_bias_N[:mine] for part in parts if part.qkv_bias_N is not None])
            assert torch.equal(bias, layer.qkv_bias_N[:queries])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3", "minicpm3"])
def test_ranks_together_are_the_whole_of_what_attends_to_latents(family: str, size: int) -> None:
    """Each makes all latents, and queries and values of its own heads."""
    path = checkpoint(family)
    latent = read_config(path).latent
    assert latent is not None
    whole, ranks = load(path), [load(path, rank, size) for rank in range(size)]
    raw = load_file(path / "model.safetensors")
    for index, layer in enumerate(whole.layers):
        parts = [rank.layers[index] for rank in ranks]
        attention = {name.split("self_attn.")[1]: one for name, one in raw.items() if f".{index}.self_attn." in name}
        first, latents = layer.qkv_ND.tensor_split([-latent.dim])
        assert torch.equal(latents, attention["kv_a_proj_with_mqa.weight"])
        assert torch.equal(first, attention["q_a_proj.weight" if latent.q_rank else "q_proj.weight"])
        mine = [part.qkv_ND.tensor_split([-latent.dim]) for part in parts]
        for one, own_latents in mine:
            assert torch.equal(own_latents, latents)
            assert not latent.q_rank or torch.equal(one, first)
        assert layer.latent is not None
        of_ranks = [part.latent for part in parts if part.latent is not None]
        if latent.q_rank:
            assert torch.equal(layer.latent.query_XQ, attention["q_b_proj.weight"])
            assert torch.equal(torch.cat([one.query_XQ for one in of_ranks]), layer.latent.query_XQ)
            assert all(torch.equal(one.query_norm_Q, attention["q_a_layernorm.weight"]) for one in of_ranks)
        else:
            assert torch.equal(torch.cat([one for one, _ in mine]), first)
            assert all(one.query_XQ is None and one.query_norm_Q is None for one in of_ranks)
        assert torch.equal(layer.latent.up_HXL.flatten(0, 1), attention["kv_b_proj.weight"])
        assert torch.equal(torch.cat([one.up_HXL for one in of_ranks]), layer.latent.up_HXL)
        assert all(torch.equal(one.latent_norm_L, attention["kv_a_layernorm.weight"]) for one in of_ranks)
        assert {one.num_still for one in of_ranks} == {latent.still}
        assert torch.equal(torch.cat([part.o_DQ for part in parts], 1), attention["o_proj.weight"])


def test_stacked_tensors_are_those_of_the_file() -> None:
    path = checkpoint("phi3")
    raw, weights = load_file(path / "model.safetensors"), load(path)
    for index, layer in enumerate(weights.layers):
        assert torch.equal(layer.qkv_ND, raw[f"model.layers.{index}.self_attn.qkv_proj.weight"])
        assert torch.equal(layer.mlp.gate_up_2FD, raw[f"model.layers.{index}.mlp.gate_up_proj.weight"])


def test_numbers_that_turn_together_are_in_two_halves() -> None:
    """Of each head of 24 the first 12; in the file they are neighbours. Values do not turn."""
    path = checkpoint("glm")
    raw, weights = load_file(path / "model.safetensors"), load(path)
    order = [*range(0, 12, 2), *range(1, 12, 2), *range(12, 24)]
    for index, layer in enumerate(weights.layers):
        for kind, ours in (("weight", layer.qkv_ND), ("bias", layer.qkv_bias_N)):
            q, k, v = (raw[f"model.layers.{index}.self_attn.{name}_proj.{kind}"] for name in "qkv")
            q, k = (one.unflatten(0, (-1, 24))[:, order].flatten(0, 1) for one in (q, k))
            assert torch.equal(ours, torch.cat((q, k, v)))
        assert torch.equal(layer.mlp.gate_up_2FD, raw[f"model.layers.{index}.mlp.gate_up_proj.weight"])


@pytest.mark.parametrize(
    ("family", "block", "names"),
    [("qwen3-moe", "mlp", ("gate_proj", "up_proj", "down_proj")), ("mixtral", "block_sparse_moe", ("w1", "w3", "w2"))],
)
def test_every_rank_has_a_part_of_each_expert(family: str, block: str, names: tuple[str, str, str]) -> None:
    path = checkpoint(family)
    raw, ranks = load_file(path / "model.safetensors"), [load(path, rank, 2) for rank in range(2)]
    for index in (0, 2):
        prefix = f"model.layers.{index}.{block}"
        parts = [rank.layers[index].mlp for rank in ranks]
        for part in parts:
            assert isinstance(part, ExpertWeights)
            assert torch.equal(part.router_LD, raw[f"{prefix}.gate.weight"])
        for expert in range(len(raw[f"{prefix}.gate.weight"])):
            gate, up, down = (raw[f"{prefix}.experts.{expert}.{name}.weight"] for name in names)
            assert torch.equal(torch.cat([part.gate_up_E2FD[expert, 0::2] for part in parts]), gate)
            assert torch.equal(torch.cat([part.gate_up_E2FD[expert, 1::2] for part in parts]), up)
            assert torch.equal(torch.cat([part.down_EDF[expert] for part in parts], 1), down)
    if family == "qwen3-moe":
        dense = ranks[1].layers[1].mlp
        assert isinstance(dense, MlpWeights)
        assert torch.equal(dense.down_DF, raw["model.layers.1.mlp.down_proj.weight"][:, 48:])


@pytest.mark.parametrize(("family", "name"), [("qwen2-moe", "shared_expert"), ("glm4-moe", "shared_experts")])
def test_every_rank_has_a_part_of_each_shared_expert(family: str, name: str) -> None:
    """What the file has as one MLP is several here, which are put together again."""
    path = checkpoint(family)
    raw, ranks = load_file(path / "model.safetensors"), [load(path, rank, 2) for rank in range(2)]
    parts = [rank.layers[1].mlp for rank in ranks]
    assert isinstance(parts[0], ExpertWeights)
    prefix = "model.layers.1.mlp."
    count = len(raw[f"{prefix}gate.weight"])
    gate, up, down = (raw[f"{prefix}{name}.{one}_proj.weight"] for one in ("gate", "up", "down"))
    shared = range(count, len(parts[0].down_EDF))
    gate_up = torch.cat([part.gate_up_E2FD[expert] for expert in shared for part in parts])
    assert torch.equal(gate_up[0::2], gate)
    assert torch.equal(gate_up[1::2], up)
    downs = [part.down_EDF[expert] for expert in shared for part in parts]
    assert torch.equal(torch.cat(downs, 1), down)
    for part in parts:
        assert isinstance(part, ExpertWeights)
        if family == "qwen2-moe":
            both = torch.cat((raw[f"{prefix}gate.weight"], raw[f"{prefix}shared_expert_gate.weight"]))
            assert torch.equal(part.router_LD, both)
            assert part.bias_E is None
        else:
            assert part.bias_E is not None
            assert torch.equal(part.bias_E, raw[f"{prefix}gate.e_score_correction_bias"])


def test_what_chooses_has_more_than_16_bits_where_the_file_has() -> None:
    """In two rows an expert, whose sum is the file's to 16 binary places."""
    path = checkpoint("minimax-m2")
    router = load_file(path / "model.safetensors")["model.layers.1.block_sparse_moe.gate.weight"]
    mlp = load(path, dtype=torch.bfloat16).layers[1].mlp
    assert isinstance(mlp, ExpertWeights)
    first, rest = mlp.router_LD.float().chunk(2)
    assert torch.equal(first, router.bfloat16().float())
    assert ((first + rest - router).abs() <= router.abs() * 2**-16).all()
    assert (first != router).any()


def test_gate_and_up_rows_in_turns() -> None:
    path = checkpoint("qwen2")
    for rank in range(2):
        plain, fused = load(path, rank, 2), load(path, rank, 2, fused=True)
        assert fused.interleaved
        gate, up = plain.layers[1].mlp.gate_up_2FD.chunk(2)
        assert torch.equal(fused.layers[1].mlp.gate_up_2FD, torch.stack((gate, up), 1).flatten(0, 1))


def test_biased_gate_and_up_stay_apart() -> None:
    path = checkpoint("llama-bias-tied")
    plain, fused = load(path), load(path, fused=True)
    assert not fused.interleaved
    assert torch.equal(plain.layers[1].mlp.gate_up_2FD, fused.layers[1].mlp.gate_up_2FD)
