"""What sets families of models apart, on a GPU: transformers' tokens in fp32, the same bits in bf16, Triton alone."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs

from checkpoints import checkpoint, make_checkpoint, random_prompts, reference_greedy
from families import VOCAB_SIZE
from launched_kernels import foreign_kernels, launched_kernels
from plan_driver import GREEDY as GREEDY_STEPS
from plan_driver import Job, run_jobs
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from tercet.model.checkpoint import open_model
from tercet.model.decoder import Decoder
from tercet.model.kv_cache import make_kv_cache
from tercet.model.parallel import Group
from tercet.model.runner import Runner
from tercet.model.runner_settings import RunnerSettings
from tercet.model.states import make_states, num_places
from tercet.model.weights import load_weights
from whole_engine import GREEDY, generate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FAMILIES = ["mistral", "phi3", "smollm3", "granite", "gemma2", "gemma3", "olmo2", "olmo3", "seed-oss", "glm", "glm4"]
FAMILIES += ["ministral", "ministral3", "ernie4.5", "ernie4.5-bias", "ernie4.5-moe", "exaone4", "arcee-bias", "apertus"]
FAMILIES += ["hunyuan", "hunyuan-bias", "hunyuan-moe"]
FAMILIES += ["gemma4", "gemma4-moe", "gemma4-told"]
FAMILIES += ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "glm4-moe", "dots1", "minimax-m2", "gpt-oss"]
LATENTS = ["deepseek-v2-groups", "deepseek-v3", "mistral4", "glm4-moe-lite", "youtu", "minicpm3"]
STATES = ["qwen3-next", "qwen3.5", "qwen3.5-moe", "granite-h", "nemotron-h"]
REAL_HEADS = {
    "granite-h": {"mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_state": 128},
    "nemotron-h": {"mamba_head_dim": 64, "ssm_state_size": 128},
}
"""Of Mamba; of gated delta layers it is what others have."""
FAMILIES += LATENTS + STATES
WHOLE_HEADS = "granite", "olmo2", "olmoe", "qwen2-moe", "dots1", "ernie4.5-moe"
"""Of which hidden size and number of heads say the size of a head."""
MANY = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "max_position_embeddings": 1024}
LIMITS = {"page_size": 64, "kv_cache_memory": 256 << 20, "max_num_seqs": 16, "max_num_batched_tokens": 1024}


def larger(family: str, folder: Path) -> Path:
    """With as many rows, columns and experts as make kernels of several blocks run."""
    experts = {
        "mixtral": {"num_local_experts": 8},
        "qwen2-moe": {"num_experts": 60, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 384},
        "olmoe": {"num_experts": 64, "num_experts_per_tok": 8},
        "glm4-moe": {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 192},
        "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 128},
        "minimax-m2": {"num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64},
        "gpt-oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
        "gemma4-moe": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 192},
        "gemma4-told": {"hidden_size_per_layer_input": 256},
        "qwen3-moe": {"num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 192},
        "deepseek-v2-groups": {"n_routed_experts": 160, "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6},
        "deepseek-v3": {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
        "hunyuan-moe": {"num_experts": 64, "moe_topk": 8, "intermediate_size": 192},
        "ernie4.5-moe": {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 192},
        "mistral4": {"n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 192},
        "glm4-moe-lite": {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 192},
        "qwen3-next": {"num_experts": 512, "num_experts_per_tok": 10, "mlp_only_layers": []},
        "qwen3.5-moe": {"num_experts": 256, "num_experts_per_tok": 8},
        "granite-h": {"num_local_experts": 64, "num_experts_per_tok": 6, "intermediate_size": 128}
        | {"shared_intermediate_size": 256},
        "nemotron-h": {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 128}
        | {"moe_shared_expert_intermediate_size": 256},
    }.get(family, {})
    heads = {} if family in WHOLE_HEADS else {"head_dim": 128}
    if family == "glm4":
        heads |= {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}
    if family in ("phi3", "olmo3"):
        heads = {"num_attention_heads": 4}  # with a window, and as wide as Hopper's kernels want them
    if family in ("gemma3", "qwen3.5"):
        heads = {"head_dim": 256}
    if family.startswith("gemma4"):
        heads = {"head_dim": 256, "global_head_dim": 512, "sliding_window": 128}
    if family in LATENTS:
        heads = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        heads["num_key_value_heads"] = 8
    if family == "mistral4":
        heads |= {"kv_lora_rank": 256, "qk_nope_head_dim": 64}
    if family in STATES:
        heads = {"head_dim": 256, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
        heads |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    if family in REAL_HEADS:
        heads = {"head_dim": 128, "mamba_num_heads": 8} if family == "nemotron-h" else {}
        heads |= REAL_HEADS[family] | ({"mamba_n_heads": 8} if family == "granite-h" else {})
    if family == "minicpm3":
        heads |= {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rope_parameters": None}
    return make_checkpoint(family, folder, **{**MANY, **heads, **experts})


def with_real_heads(family: str, folder: Path) -> Path:
    """Tiny but for the heads of states, of which kernels know the sizes that there are."""
    of_delta = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    return make_checkpoint(family, folder, **REAL_HEADS.get(family, of_delta))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_greedy_is_transformers(family: str, num_ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    prompts = random_prompts(22, 3, 90, seed=8 if family == "glm" else 7)  # GLM's seventh has a near tie
    path = with_real_heads(family, tmp_path) if family in STATES else checkpoint(family)
    answers = reference_greedy(path, prompts, 24)
    assert len(set(map(tuple, answers))) == len(answers)
    params = structs.replace(GREEDY, max_tokens=24)
    options = {**LIMITS, "tensor_parallel_size": num_ranks}
    with LLM(str(path), dtype="float32", device="cuda", **options) as llm:
        assert generate(llm, prompts, params) == answers
        assert generate(llm, prompts, params) == answers  # with prefix hits


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
@pytest.mark.parametrize("family", ["llama3", "gemma2", "qwen3.5"])
def test_two_ranks_in_bf16_say_nearly_what_one_does(family: str, tmp_path: Path) -> None:
    """Sums through peer memory end in norms, whose weights have 32 bits or 16."""
    model = str(larger(family, tmp_path))
    prompts, params = random_prompts(40, 3, 90, seed=7), structs.replace(GREEDY, max_tokens=1)
    answers = []
    for num_ranks in (1, 2):
        with LLM(model, dtype="bfloat16", device="cuda", tensor_parallel_size=num_ranks, **LIMITS) as llm:
            answers.append(generate(llm, prompts, params))
    assert sum(one == other for one, other in zip(*answers, strict=True)) > 30


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_has_its_tokens_whatever_else_runs(family: str, tmp_path: Path) -> None:
    """Batch-invariant in bf16: alone, among others, in chunks."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 400))] for _ in range(40)]
    params = [SamplingParams(temperature=(0, 1)[i % 2], seed=i, max_tokens=24, ignore_eos=True) for i in range(40)]
    options = {**LIMITS, "dtype": "bfloat16", "deterministic": True, "device": "cuda", "max_num_seqs": 40}
    model = str(larger(family, tmp_path))
    with LLM(model, enable_prefix_caching=False, **options) as llm:
        alone = [generate(llm, [prompt], [param])[0] for prompt, param in zip(prompts[:10], params[:10], strict=True)]
        assert len(set(map(tuple, alone))) == len(alone)
        assert generate(llm, prompts, params)[:10] == alone
    # A tile of a prompt has to find room beside all others that decode.
    with LLM(model, **{**options, "max_num_batched_tokens": 104 if family in STATES else 64}) as llm:
        assert generate(llm, prompts, params)[:10] == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_only_triton_runs(family: str, tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    config, tensors = open_model(larger(family, tmp_path))
    config = replace(config, dtype=torch.bfloat16)
    weights = load_weights(tensors, config, rank=0, size=1, dtype=torch.bfloat16, device=device, interleaved=True)
    decoder = Decoder(config, weights, Group.single(device), 1024)
    settings = RunnerSettings(max_num_seqs=9, max_model_len=1024, max_num_batched_tokens=512, enforce_eager=True)
    cache = make_kv_cache(config, 100, 64, torch.bfloat16, device, 1)
    states = make_states(config, num_places(9, 0), torch.bfloat16, device, 1)
    runner = Runner(decoder, cache, settings, states=states)
    rng = random.Random(5)
    sampling = [structs.replace(GREEDY_STEPS, temperature=float(i % 2), max_tokens=9) for i in range(8)]
    batch = [Job([rng.randrange(3, VOCAB_SIZE) for _ in range(50 * i + 1)], one) for i, one in enumerate(sampling)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run_jobs(runner, batch, max_seqs=8, page_size=64, seed=1, budget=300)
        torch.cuda.synchronize()
    assert all(len(job.output) == 9 for job in batch)
    names = launched_kernels(profiler)
    assert any(name.endswith("_prepare_kernel") for name in names)
    assert foreign_kernels(names) == []
