"""Sampled tokens of the whole engine: the ones the definition gives, whatever happens, at the model's frequencies."""

import math
from collections.abc import Iterator

import pytest
import torch

from checkpoints import checkpoint, random_prompts, reference_model
from covering import long
from plain_sampling import deviations, plain_allowed, plain_gumbel
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from whole_engine import bytes_of_pages, generate, tiny_engine, wait_until_empty

pytestmark = pytest.mark.usefixtures("nan_memory")

FAMILY = "llama3"
NUM_TOKENS = 24
PROMPTS = random_prompts(20, 3, 60, seed=3)
SETTINGS = [(1.0, 0, 1.0, 0.0), (0.7, 9, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (2.5, 0, 1.0, 0.05), (1.5, 30, 0.9, 0.02)]
"""temperature, top_k, top_p, min_p"""


def params_of(i: int) -> SamplingParams:
    temperature, top_k, top_p, min_p = SETTINGS[i % len(SETTINGS)]
    seed = [i, 2**63 - 1 - i, 2**32 + i][i % 3]
    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
    )


PARAMS = [params_of(i) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def engine(nan_memory: None) -> Iterator[LLM]:
    with tiny_engine(FAMILY) as llm:
        yield llm


@pytest.fixture(scope="module")
def undisturbed(engine: LLM) -> list[list[int]]:
    return generate(engine, PROMPTS, PARAMS)


@torch.inference_mode()
def next_logits(prompt: list[int], answer: list[int]) -> list[list[float]]:
    """transformers' logits before each token of the answer."""
    torch.set_num_threads(1)
    logits = reference_model(checkpoint(FAMILY))(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].tolist()


def test_each_token_is_what_the_definition_says(undisturbed: list[list[int]]) -> None:
    drawn = set()
    for prompt, params, answer in zip(PROMPTS, PARAMS, undisturbed, strict=True):
        assert len(answer) == NUM_TOKENS
        temperature, top_k, top_p, min_p = params.temperature, params.top_k, params.top_p, params.min_p
        assert params.seed is not None
        assert temperature is not None
        for i, (logits, token) in enumerate(zip(next_logits(prompt, answer), answer, strict=True)):
            allowed = plain_allowed(logits, temperature, top_k or 0, top_p or 1.0, min_p or 0.0)
            scores = {
                choice: logits[choice] / temperature + plain_gumbel(params.seed, len(prompt) + i, choice)
                for choice in allowed
            }
            assert token == max(scores, key=scores.__getitem__)
            drawn.add(token != max(range(len(logits)), key=logits.__getitem__))
    assert drawn == {True, False}


@pytest.mark.parametrize(
    "options",
    [
        long({"run_ahead": 1, "max_lease": 1, "max_num_seqs": 1}),
        {"run_ahead": 3, "max_lease": 8, "max_lease_ms": 1e6, "max_num_seqs": 4, "kv_cache_memory": "12 pages"},
        long({"run_ahead": 3, "max_lease": 8, "max_lease_ms": 1e6, "max_num_seqs": 4}),
        long({"max_num_batched_tokens": 7, "max_num_seqs": 5}),
        long({"kv_cache_memory": "20 pages", "max_num_batched_tokens": 64, "max_num_seqs": 20}),
        long({"tensor_parallel_size": 2, "run_ahead": 3}),
    ],
    ids=["alone", "run-ahead, preempted", "run-ahead", "chunks", "preempted", "ranks"],
)
def test_the_same_under_disturbance(options: dict[str, object], undisturbed: list[list[int]]) -> None:
    preempted = "kv_cache_memory" in options
    if preempted:
        num_pages = int(str(options["kv_cache_memory"]).split()[0])
        options = {**options, "kv_cache_memory": bytes_of_pages(FAMILY, num_pages)}
    with tiny_engine(FAMILY, **options) as llm:
        for cached in (False, True):
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == undisturbed
            if preempted:
                assert sum(output.usage.num_preemptions for output in outputs) > 0
            else:
                assert any(output.usage.num_cached_tokens for output in outputs) == cached
        wait_until_empty(llm.address)


@pytest.mark.parametrize("num_ranks", [2, long(4)])
def test_ranks_that_compare_scores(num_ranks: int, engine: LLM, undisturbed: list[list[int]]) -> None:
    """Without thresholds in the batch nobody has the logits of the whole vocabulary; greedy and drawn side by side."""
    plain = [i for i in range(len(PROMPTS)) if i % len(SETTINGS) == 0]
    prompts, params = [PROMPTS[i] for i in plain], [PARAMS[i] for i in plain]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    wanted = generate(engine, prompts, greedy)
    with tiny_engine(FAMILY, tensor_parallel_size=num_ranks) as llm:
        answers = generate(llm, [*prompts, *prompts], [*params, *[greedy] * len(prompts)])
    assert answers == [undisturbed[i] for i in plain] + wanted


def test_seeds(engine: LLM) -> None:
    """Another seed, another answer; without one each request draws its own, and the engine's seed decides which."""
    loose = SamplingParams(temperature=2.0, max_tokens=20, ignore_eos=True)
    prompts = [PROMPTS[0]] * 6

    def answers(seed: int) -> list[list[int]]:
        with tiny_engine(FAMILY, seed=seed) as llm:
            return generate(llm, prompts, loose)

    first, again, other = answers(5), answers(5), generate(engine, prompts, loose)
    assert first == again
    assert len({tuple(answer) for answer in first + other}) == 2 * len(prompts)


@pytest.mark.parametrize("setting", [long((1.0, 0, 1.0, 0.0)), (3.0, 0, 1.0, 0.0), (4.0, 25, 0.9, 0.05)])
def test_frequencies_follow_the_softmax(engine: LLM, setting: tuple[float, int, float, float]) -> None:
    """Many requests of one token, each with its seed."""
    temperature, top_k, top_p, min_p = setting
    num_draws = 1500
    params = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=1000 + i, max_tokens=1)
        for i in range(num_draws)
    ]
    prompt = PROMPTS[4]
    tokens = [ids[0] for ids in generate(engine, [prompt] * num_draws, params)]
    logits = next_logits(prompt, [0])[0]
    allowed = sorted(plain_allowed(logits, temperature, top_k, top_p, min_p))
    assert set(tokens) <= set(allowed)
    weights = [math.exp((logits[token] - max(logits)) / temperature) for token in allowed]
    expected = [num_draws * weight / sum(weights) for weight in weights]
    assert sum(mean >= 5 for mean in expected) >= 4, "too certain a model to tell"
    assert deviations([tokens.count(token) for token in allowed], expected) < 5
