"""Tercet and its peers behind one face: `generate(prompts, output lengths) -> None`, timed from outside.

A peer is imported only when it is asked for. All run with the prefix cache off and the same budgets, sampling at
temperature 0.6 with `ignore_eos`, so that every engine does the same work.
"""

from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, list[int]], None]

MAX_BATCHED_TOKENS = 16_384
MAX_SEQUENCES = 512
_TEMPERATURE = 0.6


class BenchEngine:
    """A loaded engine. `close` frees what it holds."""

    def __init__(self, generate: Generate, close: Callable[[], None], details: dict[str, Any]) -> None:
        self.generate = generate
        self.close = close
        self.details = details


def tercet(model: str, options: dict[str, Any]) -> BenchEngine:
    from tercet.engine.llm import LLM
    from tercet.ipc.messages import SamplingParams

    given = {"max_num_batched_tokens": MAX_BATCHED_TOKENS, "max_num_seqs": MAX_SEQUENCES, **options}
    llm = LLM(model, enable_prefix_caching=False, **given)

    def generate(prompts: Prompts, lengths: list[int]) -> None:
        params = [SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, max_tokens=length) for length in lengths]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths

    return BenchEngine(generate, llm.close, {"startup_s": llm.startup_seconds})


def vllm(model: str, options: dict[str, Any]) -> BenchEngine:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model,
        enable_prefix_caching=False,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_num_seqs=MAX_SEQUENCES,
        tensor_parallel_size=options.get("tensor_parallel_size", 1),
        load_format=options.get("load_format", "auto"),
    )

    def generate(prompts: Prompts, lengths: list[int]) -> None:
        params = [SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, max_tokens=length) for length in lengths]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return BenchEngine(generate, lambda: None, {})


def nanovllm(model: str, options: dict[str, Any]) -> BenchEngine:
    from nanovllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model, max_model_len=options.get("max_model_len", 4096), max_num_batched_tokens=MAX_BATCHED_TOKENS)

    def generate(prompts: Prompts, lengths: list[int]) -> None:
        params = [SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, max_tokens=length) for length in lengths]
        llm.generate(prompts, params, use_tqdm=False)

    return BenchEngine(generate, lambda: None, {})


def transformers(model: str, options: dict[str, Any]) -> BenchEngine:
    """`generate` for one prompt, `generate_batch` (continuous batching, paged) for several."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    where: dict[str, Any] = {}
    if model.endswith(".gguf"):
        folder, _, file = model.rpartition("/")
        model, where = folder, {"gguf_file": file}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **where).to(device).eval()

    def settings(length: int) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=True,
            temperature=_TEMPERATURE,
            top_k=0,
            pad_token_id=0,
        )

    def generate(prompts: Prompts, lengths: list[int]) -> None:
        with torch.inference_mode():
            if len(prompts) == 1:
                ids = torch.tensor(prompts, device=device)
                loaded.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings(lengths[0]))
            else:
                assert len(set(lengths)) == 1, "transformers' generate_batch takes one length for all"
                loaded.generate_batch(prompts, generation_config=settings(lengths[0]))

    return BenchEngine(generate, lambda: None, {"threads": torch.get_num_threads()})


ENGINES: dict[str, Callable[[str, dict[str, Any]], BenchEngine]] = {
    "tercet": tercet,
    "vllm": vllm,
    "nanovllm": nanovllm,
    "transformers": transformers,
}
