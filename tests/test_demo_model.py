"""The demo model: a 4-bit GGUF file, through the whole engine, says what transformers says in fp32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from demo import demo_file
from tercet.engine.llm import LLM
from tercet.engine.text_codec import load_codec
from tercet.ipc.messages import SamplingParams

PROMPTS = [
    "The opposite of hot is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "My favourite book is about",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\n",
    "The three primary colours are",
    "To make a cup of tea, first",
    "In 1969, people",
]
NUM_TOKENS = 10


def llama_gguf_in_transformers(file: Path) -> Any:
    """A GGUF file of the llama family in transformers, fp32, dequantized and put in order here and not by our loader.

    (transformers' own GGUF loading wants the package accelerate.)
    """
    reader = gguf.GGUFReader(file)
    fields = {
        name.removeprefix("llama."): field.contents() for name, field in reader.fields.items() if "llama." in name
    }
    tensors = {
        tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in reader.tensors
    }
    heads = {"q": fields["attention.head_count"], "k": fields["attention.head_count_kv"]}
    config = LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=fields["embedding_length"],
        intermediate_size=fields["feed_forward_length"],
        num_hidden_layers=fields["block_count"],
        num_attention_heads=heads["q"],
        num_key_value_heads=heads["k"],
        max_position_embeddings=fields["context_length"],
        rms_norm_eps=fields["attention.layer_norm_rms_epsilon"],
        tie_word_embeddings="output.weight" not in tensors,
        rope_parameters={"rope_type": "default", "rope_theta": fields["rope.freq_base"]},
    )
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
    }
    state["lm_head.weight"] = tensors.get("output.weight", tensors["token_embd.weight"])
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    names |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {
        f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")
    }
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            tensor = tensors[f"blk.{layer}.{theirs}.weight"]
            if num_heads := heads.get(theirs.removeprefix("attn_")):
                # llama.cpp turns pairs of neighbours, transformers turns the two halves of a head.
                pairs = tensor.view(num_heads, -1, 2, tensor.shape[1])
                tensor = torch.cat((pairs[:, :, 0], pairs[:, :, 1]), 1).reshape(tensor.shape)
            state[f"model.layers.{layer}.{ours}.weight"] = tensor
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Its worker has a thread for each core, unlike those of tiny models in `make test`, even where OpenMP is told that
    it may give fewer than are asked for: oneDNN's products would be wrong then."""
    demo_file()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_DYNAMIC", "true")
        patch.delenv("PYTHONPATH", raising=False)
        with LLM("demo", device="cpu", max_model_len=512, kv_cache_memory=256 << 20) as engine:
            yield engine


def likeliest(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """The likeliest token at each place of an answer, after all that is before it there.

    What equals that is the greedy answer, found here in one pass and not in one for each token.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer[:-1]])).logits[0]
    ids: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return ids


def test_greedy_text_equals_transformers(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    codec = load_codec(demo_file())
    prompt_ids = [list(codec.encode(prompt)) for prompt in PROMPTS]
    torch.set_num_threads(1)  # others are at work beside it, and threads would wait for each other
    model = llama_gguf_in_transformers(demo_file())
    # One by one: padding in a batch is enough to make transformers decide a close call otherwise.
    for ids, output in zip(prompt_ids, outputs, strict=True):
        answer = output.outputs[0].token_ids
        assert len(answer) == NUM_TOKENS
        assert answer == likeliest(model, ids, answer)
    assert len({output.outputs[0].text for output in outputs}) == len(PROMPTS)
    assert all(output.outputs[0].text.strip() for output in outputs)


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
