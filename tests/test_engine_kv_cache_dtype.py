"""--kv-cache-dtype: tokens are those of transformers with a cache in FP8, whatever the engine does meanwhile, and where
one token in float32 has its place there is room for four. fp32 on the CPU, real processes."""

import functools
from typing import Any

import pytest

from checkpoints import checkpoint
from fp8_cache import fp8_greedy
from tercet.engine.config import EngineConfig
from whole_engine import GREEDY, NUM_TOKENS, bytes_of_pages, disturbances, generate, greedy_cases, info, tiny_engine

FAMILY, WITH_LATENTS = "qwen3", "deepseek-v3"


@functools.cache
def cases(family: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what is said to them: not always what an exact cache makes of them."""
    prompts, exact = greedy_cases(family)
    answers = fp8_greedy(checkpoint(family), prompts[:12], NUM_TOKENS)
    assert sum(answer != other for answer, other in zip(answers, exact, strict=False)) > 3
    return prompts[:12], answers


def check_greedy(family: str, options: dict[str, Any]) -> None:
    if "kv_cache_memory" in options:
        options = options | {"kv_cache_memory": options["kv_cache_memory"] // 4}  # as few pages
    prompts, answers = cases(family)
    with tiny_engine(family, kv_cache_dtype="fp8", **options) as llm:
        assert generate(llm, prompts, GREEDY) == answers
        assert generate(llm, prompts[:2], GREEDY) == answers[:2]  # behind what the prefix cache has


@pytest.mark.parametrize("options", disturbances(FAMILY))
def test_greedy_is_that_of_rounded_keys_and_values(options: dict[str, Any]) -> None:
    check_greedy(FAMILY, options)


@pytest.mark.long
@pytest.mark.parametrize("options", disturbances(WITH_LATENTS))
def test_greedy_is_that_of_rounded_latents(options: dict[str, Any]) -> None:
    check_greedy(WITH_LATENTS, options)


@pytest.mark.long
@pytest.mark.parametrize("options", disturbances("gemma4"))
def test_greedy_is_that_of_rounded_keys_and_values_of_several_sizes(options: dict[str, Any]) -> None:
    check_greedy("gemma4", options)


def test_four_tokens_in_the_room_of_one() -> None:
    """That so many bytes are room for as many pages in float32, test_engine_exactness.py has from an engine."""
    with tiny_engine(FAMILY, kv_cache_dtype="fp8_e4m3", kv_cache_memory=bytes_of_pages(FAMILY, 40)) as llm:
        assert info(llm.address).num_pages == 160


def test_a_kind_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"--kv-cache-dtype got 'fp8_e5m2'; want one of auto, fp8, fp8_e4m3"):
        EngineConfig(model="m", kv_cache_dtype="fp8_e5m2")  # type: ignore[arg-type]
