"""What requests change in their logits, by the whole engine: each token is what transformers' logits and the definition
of every parameter give, alone and among others, greedy and drawn, through `LLM` and through a socket."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from checkpoints import checkpoint, make_checkpoint, random_prompts, reference_model
from families import VOCAB_SIZE
from plain_sampling import plain_gumbel
from raw_client import RawClient
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from tercet.ipc.prompt import pack_ids
from whole_engine import disturbances, generate, tiny_engine, wait_until_empty

pytestmark = pytest.mark.usefixtures("nan_memory")

FAMILY = "llama3"
NUM_TOKENS = 30
PROMPTS = random_prompts(9, 3, 60, seed=31)
BIASES = {token: (-60.0, 2.5, 4.0)[token % 3] for token in range(20, 120)}
CHANGES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -1.5, "presence_penalty": -1.0},
    {"logit_bias": BIASES},
    {"repetition_penalty": 0.9, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {7: 1.5, 300: -100}},
    {"repetition_penalty": 1.8, "min_tokens": 12, "stop_token_ids": tuple(range(100, 106))},
    {"logit_bias": {417: 100.0, 418: 100.0}, "repetition_penalty": 3.0},
]


def params_of(index: int, temperature: float = 0) -> SamplingParams:
    changes = CHANGES[index % len(CHANGES)]
    return SamplingParams(temperature=temperature, seed=index, max_tokens=NUM_TOKENS, ignore_eos=True, **changes)


@torch.inference_mode()
def raw_logits(prompt: list[int], answer: list[int]) -> torch.Tensor:
    """transformers' logits before each token of the answer."""
    torch.set_num_threads(1)
    logits = reference_model(checkpoint(FAMILY))(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1]


def changed(logits: torch.Tensor, prompt: list[int], said: list[int], params: SamplingParams) -> torch.Tensor:
    """By definition: biases, the repetition penalty, then the other two."""
    logits = logits.clone()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if params.repetition_penalty is not None:
        processor = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        logits = processor(torch.tensor([prompt + said]), logits[None])[0]
    for token, count in Counter(said).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    if len(said) < params.min_tokens:
        logits[list(params.stop_token_ids or ())] = -torch.inf
    return logits


def check_answer(prompt: list[int], params: SamplingParams, answer: list[int]) -> int:
    """Every token by the definition; returns how many the changes made different."""
    different = 0
    for position, (logits, token) in enumerate(zip(raw_logits(prompt, answer), answer, strict=True)):
        adjusted = changed(logits, prompt, answer[:position], params)
        if params.temperature:
            noise = [plain_gumbel(params.seed or 0, len(prompt) + position, id_) for id_ in range(VOCAB_SIZE)]
            adjusted = adjusted / params.temperature + torch.tensor(noise)
        assert token == int(adjusted.argmax())
        different += token != int(logits.argmax())
    return different


@pytest.fixture(scope="module")
def engine(nan_memory: None) -> Iterator[LLM]:
    with tiny_engine(FAMILY, max_num_seqs=6) as llm:
        yield llm


def test_greedy_among_others(engine: LLM) -> None:
    params = [params_of(index) for index in range(len(PROMPTS))]
    for _ in range(2):  # slots are used again, by requests that ask for other things
        answers = generate(engine, PROMPTS, params)
        for index, (prompt, one, answer) in enumerate(zip(PROMPTS, params, answers, strict=True)):
            different = check_answer(prompt, one, answer)
            assert bool(different) == bool(CHANGES[index]), CHANGES[index]
    plain = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for prompt, answer in zip(PROMPTS, generate(engine, PROMPTS, plain), strict=True):
        assert check_answer(prompt, plain, answer) == 0


def test_drawn(engine: LLM) -> None:
    params = [params_of(index, temperature=0.8) for index in range(len(PROMPTS))]
    for prompt, one, answer in zip(PROMPTS, params, generate(engine, PROMPTS, params), strict=True):
        check_answer(prompt, one, answer)


@pytest.mark.parametrize("options", disturbances(FAMILY))
def test_under_disturbance(options: dict[str, Any]) -> None:
    params = [params_of(index) for index in range(len(PROMPTS))]
    with tiny_engine(FAMILY, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for prompt, one, output in zip(PROMPTS, params, outputs, strict=True):
            check_answer(prompt, one, output.outputs[0].token_ids)
        if "kv_cache_memory" in options:
            assert sum(output.usage.num_preemptions for output in outputs) > 0
        wait_until_empty(llm.address)


def test_through_a_socket(engine: LLM) -> None:
    with RawClient(engine.address) as client:
        for index, changes in enumerate(CHANGES):
            params = {**changes, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
            client.ask("GenerateIds", str(index), pack_ids(PROMPTS[index]), params)
        for name, (_, answer, end) in client.answers(len(CHANGES)).items():
            assert end[0] == "Finished"
            check_answer(PROMPTS[int(name)], params_of(int(name)), answer)


def test_the_checkpoint_s_repetition_penalty(tmp_path: Any) -> None:
    """As in transformers' own `generate`, until a request says otherwise."""
    folder = make_checkpoint("qwen2", tmp_path / "qwen2")
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.4, "eos_token_id": 2}')
    prompt, others = PROMPTS[3], {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    model = reference_model(folder)
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        expected = [
            model.generate(torch.tensor([prompt]), **settings, repetition_penalty=penalty)[0, len(prompt) :].tolist()
            for penalty in (1.4, 1.0)
        ]
    assert expected[0] != expected[1]
    with LLM(str(folder), device="cpu", page_size=16, kv_cache_memory=32 << 20) as llm:
        assert generate(llm, prompt, SamplingParams(**others)) == expected[:1]
        assert generate(llm, prompt, SamplingParams(**others, repetition_penalty=1)) == expected[1:]
