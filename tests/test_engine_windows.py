"""Layers with windows in a whole engine: their pages are given back, and tokens are transformers' own all the same.

fp32 on the CPU, real processes; new memory is NaN, so a key that a window should not see would be seen in what is said.
"""

import pytest

from checkpoints import checkpoint, random_prompts, reference_greedy
from covering import long
from tercet.ipc.messages import SamplingParams
from whole_engine import PAGE_SIZE, bytes_of_pages, ids_of, tiny_engine, wait_until_empty

pytestmark = pytest.mark.usefixtures("nan_memory")

NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
ROOM = 19
"""Pages of all layers. The longest request takes 25 of those that see all, and 11 of those with a window of 12."""


@pytest.mark.parametrize("family", ["gemma3", long("gpt-oss"), long("exaone4")])
def test_a_request_longer_than_a_cache_of_all_layers(family: str) -> None:
    prompts = random_prompts(6, 150, 350, seed=3)
    prompts += [prompts[0] + tail for tail in random_prompts(2, 1, 60, seed=4)]
    answers = reference_greedy(checkpoint(family), prompts, NUM_TOKENS)
    with tiny_engine(family, kv_cache_memory=bytes_of_pages(family, ROOM)) as llm:
        assert max(map(len, prompts)) + NUM_TOKENS > ROOM * PAGE_SIZE
        assert ids_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == answers
        wait_until_empty(llm.address)
        (again,) = llm.generate(prompts[-1:], GREEDY, use_tqdm=False)
        (once_more,) = llm.generate(prompts[-1:], GREEDY, use_tqdm=False)
        assert ids_of([again, once_more]) == [answers[-1]] * 2
        assert once_more.usage.num_cached_tokens == (len(prompts[-1]) - 1) // PAGE_SIZE * PAGE_SIZE
