"""How much of a GPU the KV cache may take, found out by running the largest steps there are.

Knows the allocator's counters; what a step is, it asks the runner.
"""

from dataclasses import replace

import torch

from tercet.model.decoder import Decoder
from tercet.model.kv_cache import make_kv_cache
from tercet.model.runner import Runner
from tercet.model.runner_settings import RunnerSettings
from tercet.model.states import States


def kv_cache_bytes(
    decoder: Decoder, settings: RunnerSettings, page_size: int, cache_dtype: torch.dtype, utilization: float,
    states: States | None = None,
) -> int:  # fmt: skip
    """What is left for the cache when `utilization` of the whole card is in use, others' share included, and states
    that are there already."""
    device = decoder.group.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    cache = make_kv_cache(decoder.config, 2, page_size, cache_dtype, device, decoder.group.size, decoder.tables)
    Runner(decoder, cache, replace(settings, only_largest=True), states=states)
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    del cache
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # Once for steps without a graph, and once for the graphs, which have their own pool.
    return max(0, int(free - (1 - utilization) * total) - 2 * step_bytes)
