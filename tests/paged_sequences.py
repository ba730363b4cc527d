"""Drives a decoder by hand: a small paged cache, page tables in random order, and the inputs of each step.

It does what slot table, planner and runner do, in the plainest way, so that the decoder can be tested without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercet.model.adapter_file import AdapterFile
from tercet.model.adapters import adapters_for_cpu, load_adapters, ranks_of
from tercet.model.cache_tables import one_table
from tercet.model.checkpoint import open_model
from tercet.model.decoder import Decoder
from tercet.model.parallel import Group
from tercet.model.reordered import reordered_for_cpu
from tercet.model.states import States, make_states
from tercet.model.weights import load_weights
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.token_adapters import with_adapters

PAGE = 16
CPU = torch.device("cpu")


def make_decoder(
    path: Path,
    group: Group | None = None,
    *,
    layout: str = "reordered",
    deterministic: bool = False,
    adapters: Sequence[Path] = (),
) -> Decoder:
    """`layout`: "reordered" as on a CPU, "fused" as on a GPU, "plain"; `adapters`: folders."""
    group = group or Group.single(CPU)
    config, tensors = open_model(path)
    on_rank: dict[str, Any] = {"rank": group.rank, "size": group.size, "dtype": torch.float32, "device": CPU}
    on_rank["interleaved"] = layout == "fused"
    weights = load_weights(tensors, config, **on_rank)
    files = [AdapterFile(folder) for folder in adapters]
    of_layers = load_adapters(files, ranks_of(files, config), config, **on_rank) if files else ()
    if layout == "reordered":
        weights, of_layers = reordered_for_cpu(weights), adapters_for_cpu(of_layers)
    return Decoder(config, weights, group, max_model_len=512, deterministic=deterministic, adapters=of_layers)


@dataclass
class Sequences:
    """A paged cache and states full of NaN, and page tables in random order, fed by hand."""

    decoder: Decoder
    count: int
    whole: bool = False
    """Steps with chunks run once more, with all tokens' hidden states on the way: the same for the rows."""
    adapters: Sequence[int] | None = None
    """Of each slot."""
    computed: list[int] = field(init=False)

    def __post_init__(self) -> None:
        config, size = self.decoder.config, self.decoder.group.size
        pages_each = 8
        num_pages = 1 + self.count * pages_each
        own = [torch.full(shape, float("nan")) for shape in config.cache_shapes(num_pages, PAGE, size)]
        self.cache = [own[place] for place in one_table(config).places]
        for layer in own:
            layer[:, 0] = 0  # padding writes to page 0
        self.states = make_states(config, self.count, torch.float32, CPU, size)
        if self.states is not None:
            for numbers in (self.states.tails_LSTC, self.states.states_LSHDV):
                numbers.fill_(float("nan"))
        shuffled = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.page_table_SM = shuffled.view(self.count, pages_each).to(torch.int32)
        self.computed = [0] * self.count

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """So many tokens behind each, all of them side by side."""
        tokens = self.step({}, dict(enumerate(prompts))).argmax(1).tolist()
        answers = [[token] for token in tokens]
        for _ in range(num_tokens - 1):
            tokens = self.step(dict(enumerate(tokens)), {}).argmax(1).tolist()
            for answer, token in zip(answers, tokens, strict=True):
                answer.append(token)
        return answers

    def step(self, decodes: dict[int, int], chunks: dict[int, list[int]], *, pad_b: int = 0, pad_t: int = 0) -> Tensor:
        """Run one step: `decodes` slot -> token, `chunks` slot -> tokens; logits of each row's last token."""
        ids, positions, slots, lengths = [], [], [], []

        def add(slot: int, token: int) -> None:
            position = self.computed[slot]
            page = int(self.page_table_SM[slot, position // PAGE])
            ids.append(token)
            positions.append(position)
            slots.append(page * PAGE + position % PAGE)
            self.computed[slot] += 1

        def pad(count: int) -> None:
            ids.extend([0] * count)
            positions.extend([0] * count)
            slots.extend([0] * count)

        for slot, token in decodes.items():
            add(slot, token)
            lengths.append(self.computed[slot])
        pad(pad_b)
        starts = [self.computed[slot] for slot in chunks]
        ends = [0]
        for slot, tokens in chunks.items():
            for token in tokens:
                add(slot, token)
            ends.append(ends[-1] + len(tokens))
        pad(pad_t)
        num_decodes = len(decodes) + pad_b
        rows = [*range(num_decodes), *(num_decodes + end - 1 for end in ends[1:])]
        real = [*range(len(decodes)), *range(num_decodes, len(rows))]
        inputs = step_inputs(
            input_ids_T=ids,
            positions_T=positions,
            kv_slots_XT=[slots],
            decode_slots_B=[*decodes, *[0] * pad_b],
            decode_lengths_B=[*lengths, *[0] * pad_b],
            chunk_slots_C=list(chunks),
            chunk_starts_C=starts,
            query_starts_C1=ends,
            sample_rows_R=rows,
            num_tokens_1=[num_decodes + ends[-1]],
        )
        if self.adapters is not None:
            slots = torch.tensor(self.adapters, dtype=torch.int32)
            ways = {"deterministic": self.decoder.deterministic}
            inputs = with_adapters(inputs, slots, self.decoder.num_adapters, **ways)
        tables = inputs, self.cache, self.page_table_SM
        before = _copied(self.states)
        hidden_RD = self.decoder.forward(*tables, self.states)
        if chunks and self.whole:
            rows_RD, hidden_TD = self.decoder.forward_whole(*tables, before)
            # Ranks may sum long steps another way than those that need every token: other norms follow.
            off = 0.0 if self.decoder.group.size == 1 else 1e-4
            torch.testing.assert_close(rows_RD, hidden_RD, rtol=off, atol=off)
            # Sums in other orders, so that small numbers err as large ones do.
            near = 1e-4 * max([1.0, *hidden_RD[real].abs().flatten().tolist()])
            torch.testing.assert_close(hidden_TD[rows][real], hidden_RD[real], rtol=1e-4, atol=near)
        return self.decoder.head.logits(hidden_RD[real])


def _copied(states: States | None) -> States | None:
    return states and States(states.tails_LSTC.clone(), states.states_LSHDV.clone())


def step_inputs(**values: list[int] | list[list[int]]) -> StepInputs:
    wide = {"kv_slots_XT": torch.int64}
    return StepInputs(
        **{name: torch.tensor(value, dtype=wide.get(name, torch.int32)) for name, value in values.items()}
    )
