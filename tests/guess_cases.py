"""Requests for engines that try tokens ahead, what engines say to them, and what these count."""

import time
from typing import Any

from checkpoints import random_prompts
from tercet.engine.llm import LLM
from tercet.ipc.answers import EngineInfo
from tercet.ipc.messages import SamplingParams
from whole_engine import info, wait_until_empty

THREE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "disable_by_batch_size": 5}
Answers = list[tuple[list[int], str, str, Any]]
Cases = tuple[list[list[int]], list[SamplingParams], Answers]


def draws() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that say things twice, and all that may change or end an answer."""
    prompts = [prompt * 2 for prompt in random_prompts(12, 3, 30, seed=5)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.4, "seed": 3},
        {"temperature": 0.7, "top_p": 0.8, "seed": 4},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 0.3, "logprobs": 2, "seed": 6},
        {"temperature": 0.0, "min_tokens": 5},
    ]
    params = [
        SamplingParams(max_tokens=(40, 1, 23)[index % 3], ignore_eos=index % 2 == 0, **kinds[index % len(kinds)])
        for index in range(len(prompts))
    ]
    return prompts, params


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Answers:
    """Ids, text, why they end, and the order of the likeliest tokens at each place, where that is asked for."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    ranks = [
        output.logprobs and [{token_id: one.rank for token_id, one in row.items()} for row in output.logprobs]
        for output in outputs
    ]
    return [
        (output.token_ids, output.text, str(output.finish_reason), rank)
        for output, rank in zip(outputs, ranks, strict=True)
    ]


def ask_until_some_are_right(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], said: Answers) -> None:
    """And some are wrong. All answers are these. When guesses begin is a matter of what steps take."""
    for _ in range(20):
        assert answers(llm, prompts, params) == said
        gauges = settled(llm)
        if 0 < gauges.num_right_guesses < gauges.num_guesses:
            break


def settled(llm: LLM) -> EngineInfo:
    """The gauges at rest, which are told four times a second."""
    wait_until_empty(llm.address)
    time.sleep(0.5)
    return info(llm.address)
