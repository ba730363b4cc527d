"""The runner with every kernel in Triton's interpreter: greedy tokens are transformers', on a tiny fp32 model."""

import msgspec
import pytest
import torch

from checkpoints import checkpoint, random_prompts, reference_greedy
from interpreted import rerun_interpreted
from paged_sequences import CPU, make_decoder
from plan_driver import GREEDY, Job, run_jobs
from tercet.model.kv_cache import make_kv_cache
from tercet.model.runner import Runner, RunnerSettings
from tercet.triton_kernels.dispatch import INTERPRETED


@pytest.mark.skipif(not INTERPRETED, reason="the references have their own test")
def test_greedy_is_transformers() -> None:
    torch.set_num_threads(1)
    path = checkpoint("qwen3")
    decoder = make_decoder(path)
    cache = make_kv_cache(decoder.config, 20, 16, torch.float32, CPU, 1)
    settings = RunnerSettings(max_num_seqs=3, max_model_len=512, max_num_batched_tokens=64)
    prompts = random_prompts(3, 3, 20, seed=1)
    jobs = [Job(prompt, msgspec.structs.replace(GREEDY, max_tokens=5)) for prompt in prompts]
    run_jobs(Runner(decoder, cache, settings), jobs, max_seqs=3, page_size=16, seed=1)
    assert [job.output for job in jobs] == reference_greedy(path, prompts, 5)


def test_interpreted() -> None:
    rerun_interpreted(__file__)
