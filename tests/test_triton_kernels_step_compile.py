"""The kernels around the model compile for GPUs that are not here, at the sizes of a real vocabulary."""

import re
from dataclasses import fields
from math import prod

import pytest
import torch

from covering import covering
from slot_tables import empty_step, random_table
from tercet.triton_kernels import log_probabilities as log_probabilities_module
from tercet.triton_kernels import logits as logits_module
from tercet.triton_kernels import prepare as prepare_module
from tercet.triton_kernels import sample as sample_module
from tercet.triton_kernels import sample_shard as sample_shard_module
from tercet.triton_kernels import slot_table as slot_table_module
from tercet.triton_kernels import write_plan as write_plan_module
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.decode_shares import make_decode_shares, plan_decode_shares
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.guess import guess
from tercet.triton_kernels.guess_rows import GuessRows, guess_rows
from tercet.triton_kernels.next_ids import next_ids
from tercet.triton_kernels.prefill_work import make_prefill_work, plan_prefill_work
from tercet.triton_kernels.prepare import StepInputs, StepRows
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.trials import Trials, lay_out
from tercet.triton_kernels.write_plan import RunSizes
from test_triton_kernels_guess import empty_trials
from test_triton_kernels_guess_rows import empty_rows

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")


def on_meta(value: SlotTable | StepInputs | StepRows | Trials | GuessRows) -> dict[str, torch.Tensor]:
    """Of its tensors."""
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: tensor.to("meta") for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_compile_preparing(capability: int) -> None:
    table = SlotTable(**on_meta(random_table(9, 4, 64, 1000, 0)))
    inputs, rows = empty_step([1, 2], [(3, 0, 40)], 64)
    inputs, rows = StepInputs(**on_meta(inputs)), StepRows(**on_meta(rows))
    words = torch.empty(4096, dtype=torch.int32, device="meta")
    with compiling_for(capability) as kernels:
        prepare_module.prepare(rows, table, inputs, page_size=64, num_pages=100)
        write_plan_module.write_plan(words, words, RunSizes(20, 100, 2, 5000, 9), table, 100)
    assert all(kernel.asm["cubin"] for kernel in kernels)
    assert ["griddepcontrol.wait" in kernel.asm["ptx"] for kernel in kernels] == [capability == 90, False]


@pytest.mark.parametrize("capability", [80, 90])
def test_compile_what_is_guessed(capability: int) -> None:
    table = SlotTable(**on_meta(random_table(9, 4, 64, 1000, 0)))
    inputs, rows = empty_step([1, 2], [(3, 0, 40)], 64)
    inputs, rows = StepInputs(**on_meta(inputs)), StepRows(**on_meta(rows))
    trials, ahead = empty_trials([1, 2], 3), empty_rows(2, 3)
    trials, ahead = Trials(**on_meta(trials)), GuessRows(**on_meta(ahead))
    sizes = {"page_size": 64, "num_pages": 100}
    with compiling_for(capability) as kernels:
        next_ids(inputs, rows.slots_R, table, torch.empty_like(inputs.input_ids_T))
        lay_out(trials, table, num_guesses=3, **sizes)
        guess(trials, table, num_guesses=3, repeated=(2, 4), **sizes)
        guess_rows(ahead, trials.slots_B, trials.next_positions_T, table, **sizes)
    assert len(kernels) == 4
    for kernel in kernels:
        assert kernel.asm["cubin"], kernel.name
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability == 90)


@covering(1, capability=[90, 89, 80], dtype=[torch.bfloat16, torch.float16, torch.float32], num_rows=[1, 256])
def test_compile_sampling(capability: int, dtype: torch.dtype, num_rows: int) -> None:
    table = SlotTable(**on_meta(random_table(9, 4, 64, 1000, 0)))
    logits = torch.empty(num_rows, 151936, dtype=dtype, device="meta")
    slots = torch.empty(num_rows, dtype=torch.int32, device="meta")
    with compiling_for(capability) as kernels:
        sample_module.sample(logits, slots, slots, table)
    assert len(kernels) == 4
    for kernel in kernels:
        assert kernel.asm["cubin"], kernel.name
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability == 90)


def test_plans_of_very_many_rows_compile_soon() -> None:
    """A compiler's time grows faster than a program's largest tile: it is bounded, and so is that of default sizes."""
    C = 4096
    indices = torch.empty(C, dtype=torch.int32, device="meta")
    table = SlotTable(**on_meta(random_table(9, 4, 64, 1000, 0)))
    inputs, rows = empty_step([1] * C, [(3, 0, 1)] * C, C)
    inputs, rows = StepInputs(**on_meta(inputs)), StepRows(**on_meta(rows))
    begins = torch.empty(C + 1, dtype=torch.int32, device="meta")
    with compiling_for(90) as kernels:
        prepare_module.prepare(rows, table, inputs, page_size=64, num_pages=100)
        plan_decode_shares(indices, make_decode_shares(indices, 528, 32, 8, 128, 32), 8)
        plan_prefill_work(indices, indices, begins, 8192, make_prefill_work(8192, C, 128, indices.device))
    assert len(kernels) == 3
    for kernel in kernels:
        tiles = [
            prod(map(int, shape.split("x"))) for shape in re.findall(r"tensor<(\d+(?:x\d+)*)x", kernel.asm["ttir"])
        ]
        assert C <= max(tiles) <= 2**16, kernel.name


@pytest.mark.parametrize("capability", [80, 90])
def test_compile_sampling_from_a_part(capability: int) -> None:
    pdl = capability == 90
    table = SlotTable(**on_meta(random_table(9, 4, 64, 1000, 0)))
    with compiling_for(capability) as kernels:
        for num_rows in (1, 256):
            logits = torch.empty(num_rows, 151936 // 2, dtype=torch.bfloat16, device="meta")
            slots = torch.empty(num_rows, dtype=torch.int32, device="meta")
            shard = sample_shard_module.VocabShard(151936 // 2, 151936, lambda best: torch.stack([best, best]))
            sample_shard_module.sample_shard(logits, slots, slots, table, shard)
    assert len(kernels) == 3 * 2
    for kernel in kernels:
        assert kernel.asm["cubin"], kernel.name
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == pdl


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_compile_logits(capability: int) -> None:
    R, V, S = 3, 151936, 9
    table = SlotTable(**on_meta(random_table(S, 4, 64, 1000, 0)))

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    logits, slots, numbers = meta(R, V, dtype=torch.bfloat16), meta(R), meta(S, dtype=torch.float32)
    with compiling_for(capability) as kernels:
        logits = logits_module.widen(logits, slots, meta(R, V // 32))
        logits_module.penalize(logits, slots, slots, table, numbers, numbers, numbers)
        logits_module.add_bias(logits, slots, meta(S, 50), meta(S, 50, dtype=torch.float32))
        log_probabilities_module.log_probabilities(logits, slots, 5)
        slot_table_module.tokens_at(slots, slots, table)
    assert len(kernels) == 6
    for kernel in kernels:
        assert kernel.asm["cubin"], kernel.name
