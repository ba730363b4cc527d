"""The offline API over a whole engine: what it takes, what it gives back, how it refuses, how it ends."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import numpy as np
import psutil
import pytest
import torch

from checkpoints import checkpoint, tokenizer
from families import VOCAB_SIZE
from tercet.engine import llm as llm_module
from tercet.engine.config import EngineConfig
from tercet.engine.engine_process import EngineProcess
from tercet.engine.llm import LLM
from tercet.ipc.client import Client, EngineDied, RequestRefused
from tercet.ipc.messages import ChatMessage, ChatOptions, SamplingParams
from whole_engine import GREEDY, ids_of, tiny_engine, wait_until_empty

SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_engine("llama") as engine:
        yield engine


def test_a_start_tells_where_its_time_went() -> None:
    began = time.monotonic()
    with tiny_engine("llama") as llm:
        passed = time.monotonic() - began
        phases = llm.start_phases
        order = ["launch", "supervisor", "python", "imports", "device", "ranks", "weights", "largest step", "cache"]
        assert list(phases) == [*order, "graphs", "others", "first requests"]
        assert all(seconds >= 0 for seconds in phases.values())
        assert phases["imports"] > 0.1 < phases["python"] + phases["launch"]  # torch is large, and Python no sprinter
        assert sum(phases.values()) - phases["first requests"] == pytest.approx(llm.startup_seconds)
        assert passed - 1 < sum(phases.values()) <= passed


def test_prompts_of_every_kind(llm: LLM) -> None:
    text, ids = "the cat sat", tokenizer().encode("the cat sat", add_special_tokens=False)
    for one in (text, ids, [text], [ids], tuple(ids)):
        (output,) = llm.generate(one, SHORT, use_tqdm=False)
        assert output.prompt == (text if one in (text, [text]) else None)
        assert output.prompt_token_ids == ids
        assert output.usage.num_prompt_tokens == len(ids)
        assert output.usage.num_generated_tokens == 5
        assert len(output.outputs[0].token_ids) == 5
    assert llm.generate([], SHORT, use_tqdm=False) == []
    mixed = llm.generate([text, ids], SHORT, use_tqdm=False)
    assert ids_of(mixed)[0] == ids_of(mixed)[1]


def test_arrays_of_token_ids(llm: LLM) -> None:
    wanted = llm.generate([[5, 6, 7], [8, 9, 10]], SHORT, use_tqdm=False)
    rows = np.array([[5, 6, 7], [8, 9, 10]])
    for many in (rows, list(rows), torch.tensor(rows)):
        outputs = llm.generate(many, SHORT, use_tqdm=False)
        assert ids_of(outputs) == ids_of(wanted)
        assert [output.prompt_token_ids for output in outputs] == rows.tolist()
    for one in (rows[0], list(rows[0]), array("i", rows[0])):
        assert ids_of(llm.generate(one, SHORT, use_tqdm=False)) == ids_of(wanted[:1])


@pytest.mark.parametrize("prompts", [None, 5, b"text", [None], ["text", 5], [1.5], {"text": "text"}, [{"prompt": 5}]])
def test_what_is_no_prompt(llm: LLM, prompts: Any) -> None:
    with pytest.raises(TypeError, match="want a text, token ids, or a list of either"):
        llm.generate(prompts, SHORT, use_tqdm=False)


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, [SHORT, None], ({"n": 2}, SHORT), 5])
def test_what_is_no_params(llm: LLM, params: Any) -> None:
    with pytest.raises(TypeError, match=r"params has .*; want SamplingParams"):
        llm.generate([[5], [6]], params, use_tqdm=False)


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [40, 1, 23, 7, 2, 39]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = llm.generate([[7, 8, i] for i in range(3, 9)], params, use_tqdm=False)
    assert [len(ids) for ids in ids_of(outputs)] == lengths
    assert [output.prompt_token_ids for output in outputs] == [[7, 8, i] for i in range(3, 9)]


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "naïve café?"}]
    rendered = tokenizer().apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    ids = tokenizer().encode(rendered, add_special_tokens=False)
    (one,) = llm.chat(conversation, SHORT, use_tqdm=False)
    two = llm.chat([conversation, conversation], SHORT, use_tqdm=False)
    assert one.usage.num_prompt_tokens == len(ids)
    assert ids_of([one, *two]) == ids_of(llm.generate([ids] * 3, SHORT, use_tqdm=False))
    assert ids_of(llm.chat([ChatMessage("user", "naïve café?")], SHORT, use_tqdm=False)) == ids_of([one])
    assert llm.chat([], use_tqdm=False) == []


def test_a_chat_whose_last_turn_goes_on(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "naïve café?"}, {"role": "assistant", "content": "The"}]
    rendered = tokenizer().apply_chat_template(conversation, continue_final_message=True, tokenize=False)
    ids = tokenizer().encode(rendered, add_special_tokens=False)
    (one,) = llm.chat(conversation, SHORT, options=ChatOptions(ending="continued"), use_tqdm=False)
    assert one.usage.num_prompt_tokens == len(ids)
    assert ids_of([one]) == ids_of(llm.generate([ids], SHORT, use_tqdm=False))


@pytest.mark.parametrize("messages", ["hi", ["hi"], {"role": "user", "content": "hi"}])
def test_what_is_no_conversation(llm: LLM, messages: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"messages are {messages!r}; want a list of {{'role': …")):
        llm.chat(messages, use_tqdm=False)


def test_stop_strings_end_an_answer_before_they_appear(llm: LLM) -> None:
    (whole,) = llm.generate([9, 10, 11], GREEDY, use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[10:13]
    (cut,) = llm.generate([9, 10, 11], SamplingParams(temperature=0, stop=stop, ignore_eos=True), use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    wait_until_empty(llm.address)


def test_a_refusal_is_an_exception_and_the_engine_goes_on(llm: LLM) -> None:
    with pytest.raises(RequestRefused, match=f"token id {VOCAB_SIZE}") as refused:
        llm.generate([[5, 6], [VOCAB_SIZE], [7]], GREEDY, use_tqdm=False)
    assert refused.value.__notes__ == ["This is of prompts[1]."]
    with pytest.raises(RequestRefused, match="temperature"):
        llm.generate([5, 6], SamplingParams(temperature=float("nan")), use_tqdm=False)
    with pytest.raises(ValueError, match="got 2 prompts and 1 params"):
        llm.generate([[5, 6], [7]], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match=r"True and False are no numbers of tokens\); want a str, int32 token ids"):
        llm.generate([True, 5], GREEDY, use_tqdm=False)
    wait_until_empty(llm.address)  # the others of a refused batch were cancelled
    assert len(llm.generate([5, 6], SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 5


def test_threads_generate_at_once(llm: LLM) -> None:
    prompts = [[7, 8, index] for index in range(3, 9)]
    alone = ids_of(llm.generate(prompts, SHORT, use_tqdm=False))
    with ThreadPoolExecutor(len(prompts)) as threads:
        several = list(threads.map(lambda prompt: llm.generate(prompt, SHORT, use_tqdm=False)[0], prompts))
    assert ids_of(several) == alone


def test_an_interrupt_from_the_keyboard_cancels_all(llm: LLM) -> None:
    alone = ids_of(llm.generate([[5, 6]], SHORT, use_tqdm=False))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.generate([[5, 6]] * 40, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True), use_tqdm=False)
    wait_until_empty(llm.address)
    assert ids_of(llm.generate([[5, 6]], SHORT, use_tqdm=False)) == alone


def test_what_the_programs_own_handler_raises_cancels_all() -> None:
    """Whatever the loop does at that moment: it sends many requests, or it waits for answers."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the program's own")

    long = SamplingParams(max_tokens=400, ignore_eos=True)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        with LLM(str(checkpoint("llama")), load_format="null", null_step_ms=100, kv_cache_memory=1 << 20) as llm:
            for seconds in (0.001, 0.003, 0.01, 0.5):
                with pytest.raises(TimeoutError, match="the program's own"):
                    signal.setitimer(signal.ITIMER_REAL, seconds)
                    llm.generate([[5, 6]] * 40, long, use_tqdm=False)  # for 40 seconds and more
                wait_until_empty(llm.address)
                (output,) = llm.generate([5, 6], SHORT, use_tqdm=False)
                assert output.usage.num_generated_tokens == 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


async def test_within_a_running_loop(llm: LLM) -> None:
    """As in a notebook."""
    assert len(llm.generate([[5, 6], [7]], SHORT, use_tqdm=False)) == 2


def test_the_bar_shows_rates(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([[5, 6]] * 3, SHORT)
    said = capfd.readouterr()
    assert "3/3" in said.err
    assert "prefill" in said.err
    assert "decode" in said.err
    assert not said.out


@pytest.mark.parametrize("max_model_len", [None, 2])
def test_it_is_warm_before_its_first_prompt_and_nothing_is_left_of_that(max_model_len: int | None) -> None:
    options = {"max_num_seqs": 4, "kv_cache_memory": 1 << 20, "max_model_len": max_model_len}
    with LLM(str(checkpoint("llama")), load_format="null", **options) as llm:
        deadline = time.monotonic() + 10
        while not (gauges := wait_until_empty(llm.address)).num_steps:  # the scheduler tells now and then
            assert time.monotonic() < deadline, gauges
            time.sleep(0.05)
        assert gauges.num_prefix_hits == 0
        (output,) = llm.generate([0], SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.usage.num_cached_tokens == 0


def test_warming_up_takes_no_longer_than_it_may() -> None:
    began = time.monotonic()
    with LLM(str(checkpoint("llama")), load_format="null", null_step_ms=800, kv_cache_memory=1 << 20) as llm:
        assert time.monotonic() - began - llm.startup_seconds < 8 * 0.8  # it would be twice as many steps


def test_closed() -> None:
    engine = tiny_engine("llama", load_format="null")
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate([5], SHORT)


async def test_closed_or_dropped_within_a_running_loop(ids_only_model: Path) -> None:
    LLM(str(ids_only_model), load_format="null").close()
    llm = LLM(str(ids_only_model), load_format="null")
    process = llm._engine.process
    del llm  # as between two models: the next one needs its memory
    assert process.poll() == 0


@pytest.mark.parametrize("moment", ["__aenter__", "__aexit__"])
def test_interrupted_while_it_opens_or_closes(
    ids_only_model: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[EngineProcess] = []

    def start(config: EngineConfig) -> EngineProcess:
        engines.append(EngineProcess(config))
        return engines[0]

    async def interrupted(client: Client, *_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        await anyio.sleep_forever()

    monkeypatch.setattr(llm_module, "EngineProcess", start)
    monkeypatch.setattr(Client, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM(str(ids_only_model), load_format="null").close()
    assert engines[0].process.poll() is not None


def test_closing_ends_what_another_thread_waits_for() -> None:
    engine = tiny_engine("llama", load_format="null", null_step_ms=20)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(engine.generate, [5, 6], SamplingParams(max_tokens=400, ignore_eos=True))
        time.sleep(0.1)
        engine.close()
        with pytest.raises((EngineDied, RuntimeError), match="closed"):
            waiting.result(timeout=30)


PROGRAM = """
import sys
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
llm = LLM(sys.argv[1], device="cpu", load_format="null" if {end!r} else "auto", kv_cache_memory=1 << 22)
print(len(llm.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids), flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "import os; os._exit(0)"])
def test_a_program_without_a_main_guard_that_never_closes(end: str) -> None:
    """However it ends, its engine ends too."""
    mark = uuid.uuid4().hex  # in the environment of all it starts: other engines may run and end beside this test
    command: list[Any] = [sys.executable, "-c", PROGRAM.format(end=end), str(checkpoint("llama"))]
    environment = {**os.environ, "TERCET_TEST_MARK": mark}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "3\n"
    left = [process for process in psutil.process_iter() if _has(process, mark)]
    assert not psutil.wait_procs(left, timeout=10)[1]


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("TERCET_TEST_MARK") == mark
    except psutil.Error:
        return False
