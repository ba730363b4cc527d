"""The layer that guesses, of a model that sees, in fp32 against transformers' modules: what it makes of images."""

import pytest
import torch
from msgspec.structs import replace
from PIL import Image

from paged_sequences import CPU
from plan_driver import GREEDY, Job, run_jobs
from seeing_guessers import ReferenceSeeingGuesser, seeing_guesser
from seeing_models import Parts, Seeing, image_of, looked_at, prompt_with, reference_answer
from tercet.model.forward_step import Forwarded
from tercet.model.guess_ahead import GuessAhead
from tercet.model.kv_cache import make_kv_cache, page_size_of
from tercet.model.load import load_decoder, open_for
from tercet.model.parallel import Group
from tercet.model.runner import Runner
from tercet.model.runner_settings import GuessSettings, RunnerSettings
from tercet.model.states import make_states, num_places, state_tile
from tercet.model.step_shape import StepShape

MAX_SEQS, MOST_SLOTS, NUM_TOKENS, LENGTH, NUM_GUESSES = 4, 8, 14, 256, 3

pytestmark = pytest.mark.usefixtures("one_thread")


def make_runner(model: Seeing, device: torch.device) -> Runner:
    opened = open_for(model.folder, device, max_model_len=LENGTH, sees=True, guesses=True)
    decoder = load_decoder(opened, Group.single(device), guesses=True)
    cache = make_kv_cache(decoder.config, 80, 64 if device.type == "cuda" else 16, decoder.dtype, device, 1)
    for layer in cache.layers:
        layer[:, 1:] = float("nan")
    places = num_places(MAX_SEQS, 0)
    states = make_states(decoder.config, places, decoder.dtype, device, 1, MOST_SLOTS * (1 + NUM_GUESSES))
    guesses = GuessSettings(num_guesses=NUM_GUESSES, looked_up=None, most_slots=MOST_SLOTS)
    sizes = {"max_num_seqs": MAX_SEQS, "max_model_len": LENGTH, "max_num_batched_tokens": LENGTH}
    settings = RunnerSettings(**sizes, most_image_tokens=64, guesses=guesses, enforce_eager=device.type == "cuda")
    return Runner(decoder, cache, settings, states=states)


def test_guesses_behind_images_are_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole prompts and in chunks, that end in an image; and tokens are transformers'."""
    check_guesses(seeing_guesser(), CPU, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_guesses_behind_images_on_a_gpu_are_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    check_guesses(seeing_guesser(large=True), torch.device("cuda"), monkeypatch)


def check_guesses(model: Seeing, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    side, reference, runner = model.side, ReferenceSeeingGuesser(model), make_runner(model, device)
    page = page_size_of(runner._kv_cache)
    prompts: list[Parts] = [
        [[5, 6, 7, 8], image_of(3, 2, side, 1), [9, 10, 11]],
        [image_of(1, 9, side, 3), [77], image_of(6, 5, side, 4), [31]],
        [[*range(40, 80)], image_of(7, 7, side, 5), [*range(100, 140)], image_of(1, 1, side, 6), [9]],
        [[50, 60, 70]],
    ]
    told = [prompt_with(model, parts) for parts in prompts]
    pictures = [[Image.fromarray(part) for part in parts if not isinstance(part, list)] for parts in prompts]
    seen = [looked_at(model, images, do_resize=False) for images in pictures]
    checked, run = [0] * NUM_GUESSES, GuessAhead.run

    def listen(self: GuessAhead, forwarded: Forwarded, shape: StepShape) -> None:
        run(self, forwarded, shape)
        slots_B = forwarded.rows.slots_R if forwarded.trials is None else forwarded.trials.slots_B
        rows, table = self._rows.cut(len(slots_B)), self._table
        for row, slot in enumerate(slots_B.tolist()):
            length, ids = int(table.length_S[slot]), table.token_ids_SL[slot].tolist()
            if not (count := int((rows.next_positions_KB[:, row] >= 0).sum())):
                continue
            (which,) = (index for index, (prompt, _) in enumerate(told) if ids[: len(prompt)] == prompt)
            wanted = reference.guesses(ids[:length], seen[which], count)
            for guess in range(count):
                if guess and int(rows.kv_slots_KB[guess, row]) < page:
                    break  # its keys are nowhere
                assert ids[length + guess] == wanted[guess], (guess, length)
                checked[guess] += 1

    monkeypatch.setattr(GuessAhead, "run", listen)
    wanted = [reference_answer(model, parts, NUM_TOKENS) for parts in prompts]
    tile = state_tile(runner._decoder.config) or 1
    for seed, num_guesses in enumerate((NUM_GUESSES, 0)):
        jobs = [Job(ids, replace(GREEDY, max_tokens=NUM_TOKENS), images=images) for ids, images in told]
        run_jobs(
            runner,
            jobs,
            max_seqs=MAX_SEQS,
            page_size=page,
            seed=seed,
            tile=tile,
            budget=tile + 6,
            num_guesses=num_guesses,
        )
        assert [job.output for job in jobs] == wanted
    assert min(checked) > 20
