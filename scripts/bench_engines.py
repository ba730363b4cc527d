"""Tercet and its peers behind one face: `generate(prompts, output lengths) -> None`, timed from outside. Lengths of 0
are for embeddings, which Tercet alone is measured with. Its requests take its adapters in turns, if it has any.

A peer is imported only when it is asked for. All run with the same budgets, with the prefix cache off unless it is what
is measured, sampling at temperature 0.6 with `ignore_eos`, so that every engine does the same work; with `sampling`
otherwise, by the names that Tercet and vLLM share.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, list[int]], None]

MAX_BATCHED_TOKENS = 16_384
MAX_SEQUENCES = 512
_TEMPERATURE = 0.6
_SAMPLING: Mapping[str, Any] = {"temperature": _TEMPERATURE, "ignore_eos": True}


class BenchEngine:
    """A loaded engine. `close` frees what it holds."""

    def __init__(
        self, generate: Generate, close: Callable[[], None], start_phases: Mapping[str, float] | None = None
    ) -> None:
        self.generate = generate
        self.close = close
        self.start_phases = start_phases or {}
        """What the seconds of its start went to, if it says so."""


def tercet(model: str, options: dict[str, Any], sampling: Mapping[str, Any]) -> BenchEngine:
    import msgspec

    from tercet.engine.llm import LLM
    from tercet.ipc.messages import SamplingParams

    given = {"max_num_batched_tokens": MAX_BATCHED_TOKENS, "max_num_seqs": MAX_SEQUENCES, **options}
    try:  # before the start
        how = msgspec.convert({**_SAMPLING, **sampling}, SamplingParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"--sampling: {error}") from None
    llm = LLM(model, **given)

    names = [each.partition("=")[0] for each in given.get("adapter", ())] or [None]

    def generate(prompts: Prompts, lengths: list[int]) -> None:
        if not any(lengths):
            assert len(llm.embed(prompts)) == len(prompts)
            return
        params = [
            msgspec.structs.replace(how, max_tokens=length, adapter=names[index % len(names)])
            for index, length in enumerate(lengths)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths

    return BenchEngine(generate, llm.close, llm.start_phases)


def vllm(model: str, options: dict[str, Any], sampling: Mapping[str, Any]) -> BenchEngine:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model,
        enable_prefix_caching=options["enable_prefix_caching"],
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_num_seqs=MAX_SEQUENCES,
        tensor_parallel_size=options.get("tensor_parallel_size", 1),
        load_format=options.get("load_format", "auto"),
    )

    def generate(prompts: Prompts, lengths: list[int]) -> None:
        params = [SamplingParams(**{**_SAMPLING, **sampling, "max_tokens": length}) for length in lengths]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return BenchEngine(generate, lambda: None)


def nanovllm(model: str, options: dict[str, Any], sampling: Mapping[str, Any]) -> BenchEngine:
    _refuse("nanovllm", sampling)
    from nanovllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model, max_model_len=options.get("max_model_len", 4096), max_num_batched_tokens=MAX_BATCHED_TOKENS)

    def generate(prompts: Prompts, lengths: list[int]) -> None:
        params = [SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, max_tokens=length) for length in lengths]
        llm.generate(prompts, params, use_tqdm=False)

    return BenchEngine(generate, lambda: None)


def transformers(model: str, options: dict[str, Any], sampling: Mapping[str, Any]) -> BenchEngine:
    """`generate` for one prompt, `generate_batch` (continuous batching, paged) for several."""
    _refuse("transformers", sampling)
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    load = _llama_from_gguf if model.endswith(".gguf") else AutoModelForCausalLM.from_pretrained
    loaded = load(model, dtype=dtype).to(device).eval()

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
        if len(prompts) == 1:
            ids = torch.tensor(prompts, device=device)
            loaded.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings(lengths[0]))
            return
        assert len(set(lengths)) == 1, "transformers' generate_batch takes one length for all"
        outputs = loaded.generate_batch(prompts, generation_config=settings(lengths[0]), progress_bar=False)
        assert [len(output.generated_tokens) for output in outputs.values()] == lengths

    return BenchEngine(generate, lambda: None)


def _refuse(engine: str, sampling: Mapping[str, Any]) -> None:
    if sampling:
        raise ValueError(f"--sampling got {', '.join(sampling)}; {engine} is measured without, want tercet or vllm")


def _llama_from_gguf(file: str, dtype: Any) -> Any:
    """A GGUF file in transformers, through Tercet's reader: transformers' own wants one more package."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tercet.model.gguf_file import GgufCheckpoint

    checkpoint = GgufCheckpoint(Path(file))
    shape = checkpoint.config
    if shape.family != "llama" or shape.rope.kind != "default" or shape.qkv_bias or shape.mlp_bias:
        raise ValueError(f"{file} holds a {shape.family}; for transformers want a plain llama, or a folder")
    state = {name: next(checkpoint.read(name, 0, 0, size[0])) for name, size in checkpoint.shapes().items()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_position_embeddings,
            rms_norm_eps=shape.rms_norm_eps,
            tie_word_embeddings=shape.tie_word_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        )
    )
    model.load_state_dict(state)
    return model.to(dtype)


ENGINES: dict[str, Callable[[str, dict[str, Any], Mapping[str, Any]], BenchEngine]] = {
    "tercet": tercet,
    "vllm": vllm,
    "nanovllm": nanovllm,
    "transformers": transformers,
}
