"""Adapters that come and go while an engine runs: each says what its merged weights say, whatever runs beside, whatever
had its name or its place before, and whoever dies. fp32 on the CPU, real processes."""

import asyncio
import itertools
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from adapter_folders import make_adapter, merged_model, says
from checkpoints import checkpoint, random_prompts
from daemon import free_port
from engine_children import children
from tercet.engine.llm import LLM
from tercet.ipc.client import Client, Overloaded, RequestRefused
from tercet.ipc.messages import EmbeddingParams, SamplingParams
from test_model_adapter_places import of_rank
from whole_engine import generate, info, tiny_engine, wait_until_empty

FAMILY = "qwen3"
PROMPTS = random_prompts(3, 40, 80, seed=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    scratch = tmp_path_factory.mktemp("adapters")
    return [make_adapter(scratch / str(seed), checkpoint(FAMILY), seed) for seed in range(4)]


@pytest.fixture(scope="module")
def llm(folders: list[Path]) -> Iterator[LLM]:
    """With an adapter from the start, and a place for one more."""
    first = (f"first={folders[0]}",)
    counts = {"max_adapters": 2, "max_adapter_rank": 20, "max_restarts": 100, "restart_window": 0.1}
    with tiny_engine(FAMILY, adapter=first, **counts, heartbeat_timeout=5) as llm:
        yield llm


def asked(name: str | None, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, "adapter": name, **more})


def is_right(llm: LLM, name: str | None, folder: Path | None) -> bool:
    """To prompts that others have been asked, too."""
    model = merged_model(checkpoint(FAMILY), folder)
    return all(
        says(model, prompt, ids) for prompt, ids in zip(PROMPTS, generate(llm, PROMPTS, asked(name)), strict=True)
    )


async def test_they_come_and_go_beside_those_that_stay(llm: LLM, folders: list[Path]) -> None:
    """Thrice the same name, in the same place: what is cached of one is found for no other."""
    said: list[list[int]] = []
    others: dict[str | None, list[list[int]]] = {None: [], "first": []}
    is_over = False

    async def keep_asking(client: Client, name: str | None) -> None:
        while not is_over:
            answer = await client.generate(PROMPTS[0], asked(name))
            others[name].append(answer.token_ids)

    with anyio.fail_after(60):
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:
            for name in others:
                tasks.start_soon(keep_asking, client, name)
            for folder in folders[1:]:
                await client.load_adapter("guest", str(folder))
                assert (await client.info()).adapters == ("first", "guest")
                said += [(await client.generate(prompt, asked("guest"))).token_ids for prompt in PROMPTS]
                await client.unload_adapter("guest")
                assert (await client.info()).adapters == ("first",)
            is_over = True
    models = [merged_model(checkpoint(FAMILY), folder) for folder in folders[1:]]
    for model, (index, ids) in zip([one for one in models for _ in PROMPTS], enumerate(said), strict=True):
        assert says(model, PROMPTS[index % len(PROMPTS)], ids)
        assert sum(says(other, PROMPTS[index % len(PROMPTS)], ids) for other in models) == 1
    for name, folder in ((None, None), ("first", folders[0])):
        assert len(others[name]) > 5
        assert len(set(map(tuple, others[name]))) == 1
        assert says(merged_model(checkpoint(FAMILY), folder), PROMPTS[0], others[name][0])


async def test_one_that_leaves_is_waited_for(llm: LLM, folders: list[Path]) -> None:
    got: list[int] = []
    begun = anyio.Event()
    with anyio.fail_after(60):
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:

            async def stream() -> None:
                async for piece in client.stream(PROMPTS[0], asked("guest", max_tokens=400)):
                    got.extend(piece.token_ids)
                    begun.set()

            await client.load_adapter("guest", str(folders[1]))
            tasks.start_soon(stream)
            await begun.wait()
            leaving = asyncio.ensure_future(client.unload_adapter("guest"))
            await anyio.sleep(0)
            for asking in (
                client.generate(PROMPTS[0], asked("guest")),
                client.embed(PROMPTS[0], EmbeddingParams(adapter="guest")),
            ):
                with pytest.raises(RequestRefused, match="adapter is 'guest'; want one of 'first', or nothing"):
                    await asking
            with pytest.raises(RequestRefused, match="has not left yet"):
                await client.load_adapter("guest", str(folders[2]))
            assert len(got) < 400
            assert not leaving.done()
            await leaving
            assert len(got) == 400
    assert says(merged_model(checkpoint(FAMILY), folders[1]), PROMPTS[0], got)
    await anyio.to_thread.run_sync(wait_until_empty, llm.address)


def test_what_cannot_be_loaded_leaves_all_as_it_was(llm: LLM, folders: list[Path], tmp_path: Path) -> None:
    wide = make_adapter(tmp_path / "wide", checkpoint("llama-bias-tied"), 1)
    tensors = (folders[1] / "adapter_model.safetensors").read_bytes()
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "adapter_model.safetensors").write_bytes(tensors[:-100])
    (cut / "adapter_config.json").write_bytes((folders[1] / "adapter_config.json").read_bytes())
    for name, folder, code, words in (
        ("guest", of_rank(tmp_path / "high", checkpoint(FAMILY), 32), "invalid_request", "is 32; want 20 at most"),
        ("guest", wide, "invalid_request", "change a matrix"),
        ("guest", cut, "invalid_request", "is truncated"),
        ("guest", tmp_path, "invalid_request", "has no adapter_config.json"),
        ("guest", tmp_path / "nowhere", "invalid_request", "no such folder or file"),
        ("first", folders[1], "invalid_request", "name is 'first'"),
    ):
        with pytest.raises(RequestRefused, match=words) as refused:
            llm.load_adapter(name, folder)
        assert refused.value.code == code
        assert info(llm.address).adapters == ("first",)
    with pytest.raises(RequestRefused, match="name is 'guest'; there is 'first'") as unknown:
        llm.unload_adapter("guest")
    assert unknown.value.code == "not_found"
    llm.load_adapter("guest", folders[1])
    with pytest.raises(RequestRefused, match=r"all 2 places .* are taken, by 'first', 'guest'") as full:
        llm.load_adapter("more", folders[2])
    assert full.value.code == "no_room"
    assert is_right(llm, "guest", folders[1])
    llm.unload_adapter("guest")


def test_whoever_dies_what_was_loaded_is_there_again(llm: LLM, folders: list[Path]) -> None:
    """In its place, though one before it is free."""
    llm.load_adapter("guest", folders[2])
    llm.unload_adapter("first")
    for name in ("worker", "scheduler", "tokenizer"):
        (process,) = children(llm._engine.process.pid, name)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert is_right(llm, "guest", folders[2]), name
        assert info(llm.address).adapters == ("guest",)
    llm.load_adapter("first", folders[3])
    llm.unload_adapter("guest")
    assert is_right(llm, "first", folders[3])


@pytest.mark.long
def test_two_ranks_share_them_and_sleep_leaves_them(folders: list[Path]) -> None:
    with tiny_engine(FAMILY, tensor_parallel_size=2, max_adapters=2, max_adapter_rank=20) as llm:
        llm.load_adapter("a", folders[1])
        llm.load_adapter("b", folders[2])
        assert is_right(llm, "a", folders[1])
        llm.sleep()
        llm.unload_adapter("a")
        with pytest.raises(Overloaded, match="asleep; want it woken up before an adapter is loaded"):
            llm.load_adapter("c", folders[3])
        llm.wake_up()
        llm.load_adapter("c", folders[3])
        assert is_right(llm, "b", folders[2])
        assert is_right(llm, "c", folders[3])
        assert is_right(llm, None, None)


def test_over_http_with_two_replicas(folders: list[Path]) -> None:
    """The shapes are vLLM's."""
    http = f"127.0.0.1:{free_port()}"
    options = {"load_format": "null", "data_parallel_size": 2, "served_model_name": "tiny", "http": http}
    with tiny_engine(FAMILY, max_adapters=2, **options):

        def ask(path: str, body: Any = None) -> tuple[int, Any]:
            data = None if body is None else json.dumps(body).encode()
            try:
                with urllib.request.urlopen(f"http://{http}{path}", data, timeout=30) as answer:
                    text = answer.read().decode()
                    return answer.status, json.loads(text) if "json" in answer.headers["content-type"] else text
            except urllib.error.HTTPError as error:
                return error.code, json.loads(error.read())["error"]["message"]

        def load(name: str, folder: object) -> tuple[int, Any]:
            return ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

        assert load("sql", folders[0]) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert load("poems", folders[1])[0] == 200
        assert [one["id"] for one in ask("/v1/models")[1]["data"]] == ["tiny", "sql", "poems"]
        firsts = set()
        for name, _ in itertools.product(("tiny", "sql", "poems"), range(4)):
            body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 1, "return_token_ids": True}
            status, answer = ask("/v1/completions", body)
            assert status == 200
            assert answer["model"] == name
            firsts.add((name, *answer["choices"][0]["token_ids"]))
        assert len(firsts) == 3, "both replicas have them in the same places"
        for answer, wanted, words in (
            (load("sql", folders[1]), 400, "lora_name is 'sql'; want another"),
            (load("tiny", folders[1]), 400, "it is the model's"),
            (load("prose", folders[1]), 400, "all 2 places (--max-adapters) are taken"),
            (ask("/v1/load_lora_adapter", {"lora_name": "x"}), 400, "lora_path"),
            (
                ask("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y", "load_inplace": True}),
                400,
                "want False",
            ),
            (ask("/v1/unload_lora_adapter", {"lora_name": "prose"}), 404, "there is 'sql', 'poems'"),
        ):
            assert answer[0] == wanted
            assert words in answer[1]
        gone = "Success: LoRA adapter 'sql' removed successfully."
        assert ask("/v1/unload_lora_adapter", {"lora_name": "sql"}) == (200, gone)
        assert ask("/v1/completions", {"model": "sql", "prompt": [5], "max_tokens": 1})[0] == 404
        assert load("prose", folders[1])[0] == 200
        assert [one["id"] for one in ask("/v1/models")[1]["data"]] == ["tiny", "poems", "prose"]
