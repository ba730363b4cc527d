"""Steps of a model whose layer that guesses knows all, one request at a time: how many of the guesses are right."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from guessing_layers import foreseen_checkpoint
from plan_driver import GREEDY, pack
from tercet.ipc.step_messages import Enter, Sampling, Step
from tercet.model.checkpoint import open_model
from tercet.model.decoder import Decoder
from tercet.model.guess_head import with_guess_head
from tercet.model.kv_cache import make_kv_cache
from tercet.model.parallel import Group
from tercet.model.runner import Runner
from tercet.model.runner_settings import GuessSettings, RunnerSettings
from tercet.model.states import make_states, num_places
from tercet.model.trial_shapes import TrialShapes
from tercet.model.weights import load_weights

PAGE, MAX_LEN, PROMPT = 16, 512, [7, 50, 300, 11]
KINDS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.9, "top_p": 0.7, "seed": 4})


def foreseeing_decoder(
    family: str, folder: Path, device: torch.device, dtype: torch.dtype, least: int, *, deterministic: bool,
    **overrides: Any,
) -> Decoder:  # fmt: skip
    """`least`: numbers of a head that is rounded for guesses; `overrides`: of config.json."""
    config, tensors = open_model(foreseen_checkpoint(family, folder, **overrides))
    config = replace(config, guesses=True)
    on_rank: dict[str, Any] = {"rank": 0, "size": 1, "dtype": dtype, "device": device, "interleaved": True}
    weights = with_guess_head(load_weights(tensors, config, **on_rank), least)
    assert weights.guesser is not None
    assert weights.guesser.head_VD is not None
    return Decoder(config, weights, Group.single(device), MAX_LEN, deterministic=deterministic, guesses=True)


def share_of_right(decoder: Decoder, num_steps: int) -> float:
    """Of two guesses of each of so many steps, of requests that are greedy, that draw, and that have thresholds."""
    device, num_pages = decoder.group.device, MAX_LEN // PAGE
    cache = make_kv_cache(decoder.config, 1 + num_pages, PAGE, decoder.dtype, device, 1)
    guesses = GuessSettings(num_guesses=2, looked_up=None, most_slots=2)
    settings = RunnerSettings(max_num_seqs=2, max_model_len=MAX_LEN, max_num_batched_tokens=64, guesses=guesses)
    tried = TrialShapes(guesses).max_rows
    states = make_states(decoder.config, num_places(2, 0), decoder.dtype, device, 1, tried)
    runner = Runner(decoder, cache, settings, states=states)
    pages = pack(*(number for page in range(num_pages) for number in (0, page, 1 + page)))
    right = step_id = 0
    for kind in KINDS:
        sampling: Sampling = msgspec.structs.replace(GREEDY, max_tokens=400, **kind)
        enter = Enter(0, pack(*PROMPT), len(PROMPT), sampling)
        runner.begin(Step(step_id, 1, b"", (enter,), pages, pack(0, 0, len(PROMPT)), b"", longest=0))
        assert len(runner.launch(0).wait()) == 1
        length = len(PROMPT) + 1
        for _ in range(num_steps):
            step_id += 1
            runner.begin(Step(step_id, 1, b"", (), b"", b"", pack(0), longest=length + 3, num_guesses=2))
            tokens = [token for token in runner.launch(0).wait().tolist() if token >= 0]
            assert tokens
            right, length = right + len(tokens) - 1, length + len(tokens)
        step_id += 1
    return right / (2 * len(KINDS) * num_steps)
