"""Engines whose weights are exchanged while they run: they say what transformers says of whichever they have."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import anyio
import psutil
import pytest
from safetensors.torch import load_file, save_file

from checkpoints import checkpoint, greedy, make_checkpoint, random_prompts, reference_greedy, reference_model
from engine_children import children
from tercet.engine.llm import LLM
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.messages import SamplingParams
from whole_engine import GREEDY, NUM_TOKENS, generate, info, tiny_engine

FAMILY = "qwen3"
PROMPTS = random_prompts(6, 20, 90, seed=11)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same model, and nothing else that an engine reads."""
    folder = make_checkpoint(FAMILY, tmp_path_factory.mktemp("other"), seed=1)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    return folder


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_engine(FAMILY, max_restarts=100, restart_window=0.1) as llm:
        yield llm


def weights_of(llm: LLM, now: Path) -> None:
    """If it has others."""
    if info(llm.address).weights != str(now):
        llm.update_weights(now)


def says(llm: LLM, folder: Path) -> bool:
    """To prompts that it has been asked before: nothing of what was computed with others is found again."""
    return generate(llm, PROMPTS, GREEDY) == reference_greedy(folder, PROMPTS, NUM_TOKENS)


def test_tokens_are_those_of_the_weights_there_are(llm: LLM, other: Path) -> None:
    first = checkpoint(FAMILY)
    assert info(llm.address).weights == str(first)
    assert says(llm, first)
    (worker,) = children(llm._engine.process.pid, "worker")
    llm.update_weights(other)
    assert info(llm.address).weights == str(other)
    assert info(llm.address).model == str(first)
    assert says(llm, other)
    assert children(llm._engine.process.pid, "worker") == [worker], "they are read where the first ones were"
    worker.send_signal(signal.SIGKILL)
    assert says(llm, other), "a worker that takes a dead one's place has its weights"
    llm.sleep()
    llm.wake_up(first)
    assert says(llm, first)


@pytest.mark.long
async def test_what_is_kept_goes_on_with_the_new_ones_behind_what_it_has_said(llm: LLM, other: Path) -> None:
    await anyio.to_thread.run_sync(weights_of, llm, checkpoint(FAMILY))
    workers = children(llm._engine.process.pid, "worker")
    got: list[int] = []
    with anyio.fail_after(60):
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:

            async def stream() -> None:
                async for piece in client.stream(PROMPTS[0], LONG):
                    got.extend(piece.token_ids)

            tasks.start_soon(stream)
            while len(got) < 5:
                await anyio.sleep(0.002)
            await client.update_weights(str(other), "keep")
    assert children(llm._engine.process.pid, "worker") == workers
    (before,) = reference_greedy(checkpoint(FAMILY), PROMPTS[:1], 300)
    same = next(place for place, (one, two) in enumerate(zip(got, before, strict=True)) if one != two)
    assert same >= 5
    # The new ones may have agreed with the old ones for a token or two.
    assert any(
        greedy(reference_model(other), [PROMPTS[0] + got[:cut]], 300 - cut) == [got[cut:]]
        for cut in range(same, max(same - 4, 4), -1)
    )


@pytest.fixture
def unfit(tmp_path: Path, other: Path, request: pytest.FixtureRequest) -> Path:
    kind: str = request.param
    match kind:
        case "sizes":
            return make_checkpoint(FAMILY, tmp_path / "wide", intermediate_size=160)
        case "vocabulary":
            return make_checkpoint(FAMILY, tmp_path / "words", vocab_size=300)
        case "family":
            return checkpoint("llama")
        case "no weights":
            shutil.copytree(other, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
            return tmp_path / "bare"
        case "cut off":
            cut = Path(shutil.copytree(other, tmp_path / "cut"))
            os.truncate(cut / "model.safetensors", (cut / "model.safetensors").stat().st_size - 1000)
            return cut
        case "no path":
            return tmp_path / "a\0b"
        case _:
            return tmp_path / "nowhere"


@pytest.mark.parametrize(
    ("unfit", "words"),
    [
        ("sizes", "intermediate_size of its configuration is 160; want"),
        ("vocabulary", "vocab_size of its configuration is 300; want"),
        ("family", "family of its configuration is 'llama'; want 'qwen3'"),
        ("no weights", "has no .safetensors file"),
        ("cut off", "is truncated"),
        ("nowhere", "no such folder or file"),
        ("no path", "embedded null byte"),
    ],
    indirect=["unfit"],
)
def test_what_does_not_fit_is_refused_before_anything_ends(llm: LLM, unfit: Path, words: str) -> None:
    workers = children(llm._engine.process.pid, "worker")
    weights = info(llm.address).weights
    with pytest.raises(RequestRefused, match=words) as refused:
        llm.update_weights(unfit, mode="abort")
    assert refused.value.code == "invalid_request"
    assert repr(str(unfit))[1:-1] in str(refused.value)
    assert children(llm._engine.process.pid, "worker") == workers
    assert info(llm.address).weights == weights


@contextmanager
def held_up(llm: LLM, folder: Path) -> Iterator[Future[None]]:
    """Weights that are found to be the model's are to be read, and the scheduler cannot say so."""
    (scheduler,) = children(llm._engine.process.pid, "scheduler")
    scheduler.suspend()
    threads = ThreadPoolExecutor(1)
    try:
        changing = threads.submit(llm.update_weights, folder)
        time.sleep(1)
        assert not changing.done()
        yield changing
    finally:
        threads.shutdown(wait=False)
        if scheduler.is_running():
            scheduler.resume()


@pytest.mark.long
@pytest.mark.parametrize("victim", ["worker", "scheduler", "tokenizer"])
def test_who_dies_meanwhile(llm: LLM, other: Path, victim: str) -> None:
    """Other workers have them in the end, unless it is the tokenizer, whose successor is asked again."""
    weights_of(llm, checkpoint(FAMILY))
    workers = children(llm._engine.process.pid, "worker")
    with held_up(llm, other) as changing:
        children(llm._engine.process.pid, victim)[0].kill()
    changing.result(60)
    assert info(llm.address).weights == str(other)
    assert says(llm, other)
    assert (children(llm._engine.process.pid, "worker") == workers) == (victim == "tokenizer")


@pytest.mark.long
def test_files_that_are_cut_off_once_they_were_looked_at(llm: LLM, other: Path, tmp_path: Path) -> None:
    first = checkpoint(FAMILY)
    weights_of(llm, first)
    cut = Path(shutil.copytree(other, tmp_path / "cut"))
    with held_up(llm, cut) as changing:
        os.truncate(cut / "model.safetensors", 50_000)
    with pytest.raises(RequestRefused, match=r"as before: worker 0: .* is truncated") as failed:
        changing.result(60)
    assert failed.value.code == "change_failed"
    assert info(llm.address).weights == str(first)
    assert says(llm, first)


@pytest.mark.long
def test_weights_that_have_no_place_are_other_workers(tmp_path: Path) -> None:
    """A head that is not the embedding, where that is both. On the CPU it is in float16."""
    apart = make_checkpoint(FAMILY, tmp_path, seed=2)
    tensors = load_file(apart / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].flip(0)
    save_file({**tensors, "lm_head.weight": head}, apart / "model.safetensors", {"format": "pt"})
    with tiny_engine(FAMILY, dtype="float16") as llm:
        workers = children(llm._engine.process.pid, "worker")
        llm.update_weights(apart)
        assert info(llm.address).weights == str(apart)
        assert not set(children(llm._engine.process.pid, "worker")) & set(workers)
        said = generate(llm, PROMPTS, GREEDY)
    with tiny_engine(apart, dtype="float16") as llm:
        assert generate(llm, PROMPTS, GREEDY) == said


@pytest.mark.long
def test_workers_that_do_not_start_after_all(llm: LLM, other: Path) -> None:
    """They are killed on the way. The weights are those there were; an engine that was asleep sleeps on."""
    first = checkpoint(FAMILY)
    weights_of(llm, first)
    before = children(llm._engine.process.pid, "worker")
    with ThreadPoolExecutor() as threads:
        for change in (llm.update_weights, llm.wake_up):
            if change == llm.update_weights:
                with held_up(llm, other) as changing:
                    before[0].kill()
            else:
                changing = threads.submit(change, other)
            (worker,) = newcomers(llm, before)
            worker.kill()
            with pytest.raises(RequestRefused, match=r"as before: worker 0 was killed by SIGKILL") as failed:
                changing.result(30)
            assert failed.value.code == "change_failed"
            assert info(llm.address).weights == str(first)
            if change == llm.update_weights:
                assert says(llm, first)
                llm.sleep()
            assert info(llm.address).is_asleep == (not children(llm._engine.process.pid, "worker"))
            before = []
    with pytest.raises(RequestRefused, match="family of its configuration is 'llama'; want 'qwen3'"):
        llm.wake_up(checkpoint("llama"))
    llm.wake_up()
    assert says(llm, first)


def newcomers(llm: LLM, known: list[psutil.Process]) -> list[psutil.Process]:
    """Workers, once there are others."""
    while not (found := [one for one in children(llm._engine.process.pid, "worker") if one not in known]):
        time.sleep(0.01)
    return found
