"""One rank of a group of GPUs, running a few steps under a profiler: what it launches must be Triton's or NCCL's.

`python gpu_rank_steps.py RANK SIZE RENDEZVOUS MODEL`; ends with 0 when nothing else ran.
"""

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from launched_kernels import foreign_kernels, launched_kernels
from plan_driver import GREEDY, pack
from tercet.ipc.step_messages import Draw, Enter, Sampling, Step
from tercet.model.kv_cache import make_kv_cache
from tercet.model.load import load_decoder, open_for
from tercet.model.parallel import Group
from tercet.model.runner import Runner
from tercet.model.runner_settings import RunnerSettings

SETTINGS = RunnerSettings(max_num_seqs=8, max_model_len=1024, max_num_batched_tokens=1024, enforce_eager=True)
LENGTHS = {0: 300, 1: 700, 2: 60}
PICKY = Sampling(0.9, 40, 0.9, 0.0, 3, 500, 0, b"")


def kernels_of_steps(runner: Runner, num_answers: int) -> set[str]:
    """Of a prompt, a prompt beside a row, rows that draw, rows that choose among all logits, and rows that await masks.

    `num_answers`: 1 or 0, whether this rank tells what a row's token is.
    """
    samplings = {0: GREEDY, 1: PICKY, 2: msgspec.structs.replace(GREEDY, grammar="a grammar")}
    enter = tuple(Enter(slot, pack(*range(length)), length, samplings[slot]) for slot, length in LENGTHS.items())
    pages = [word for slot in LENGTHS for k in range(13) for word in (slot, k, 1 + slot * 20 + k)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for step in (
            Step(0, 1, b"", enter, pack(*pages), pack(0, 0, 300), b""),
            Step(1, 1, b"", (), b"", pack(1, 0, 700), pack(0)),
            Step(2, 1, b"", (), b"", pack(2, 0, 60), b""),
            Step(3, 3, b"", (), b"", b"", pack(0, 2)),
            Step(4, 3, b"", (), b"", b"", pack(0, 1, 2)),
            Step(5, 1, b"", (), b"", b"", pack(2, 0, 1), awaits=True),
        ):
            runner.begin(step)
            for index in range(step.count):
                if step.awaits:
                    runner.launch_model().wait()
                landing = runner.draw(Draw(5, 0, b"", "", pack(1))) if step.awaits else runner.launch(index)
                assert landing is not None
                token_ids = landing.wait()
                num_rows = len(step.decodes) // 4 + len(step.chunks) // 12
                assert len(token_ids) == num_answers * num_rows
                assert all((token >= 0) == (row != 1 or not step.awaits) for row, token in enumerate(token_ids))
        torch.cuda.synchronize()
    return launched_kernels(profiler)


def main() -> None:
    rank, size, rendezvous, model = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    device = torch.device("cuda", rank)
    group = Group.join(rank, size, device, rendezvous, timeout_s=60.0)
    opened = open_for(model, device, max_model_len=1024, dummy_seed=0, tensor_parallel_size=size)
    decoder = load_decoder(opened, group)
    cache = make_kv_cache(decoder.config, 100, 64, decoder.dtype, device, size)
    names = kernels_of_steps(Runner(decoder, cache, SETTINGS), num_answers=int(rank == 0))
    print(f"rank {rank}: {names}", flush=True)
    assert foreign_kernels(names) == []
    assert any("nccl" in name for name in names)
    assert any(name.endswith("_all_reduce_kernel") or "all_reduce_add" in name for name in names)
    dist.barrier()
    group.close()


if __name__ == "__main__":
    main()
