"""The demo model: a 4-bit GGUF file, through the whole engine, says what transformers says in fp32."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from checkpoints import llama_gguf_in_transformers
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
NUM_TOKENS = 16


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
