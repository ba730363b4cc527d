"""Whole engines that see: conversations with images of any size, against transformers, whatever else happens."""

from typing import Any

import anyio
import anyio.to_thread
import pytest
from msgspec import structs
from PIL import Image

from covering import long
from engine_children import children
from guess_cases import settled
from seeing import picture
from seeing_guessers import seeing_guesser
from seeing_models import KINDS, Seeing, reference_chat, seeing
from tercet.engine.errors import StartupFailed
from tercet.engine.llm import LLM, RequestOutput
from tercet.ipc.client import Client
from tercet.ipc.errors import RequestRefused
from tercet.ipc.messages import ChatMessage, SamplingParams
from whole_engine import tiny_engine

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
Turn = dict[str, Any]
_APART = ("qwen2.5-vl", "qwen3.5", "mistral3", "internvl")
"""Kinds that no other one stands for."""


def conversations() -> list[list[Turn]]:
    """One image at two questions, two images, the next turn with one more, and none at all."""
    first, second, third = picture(61, 43, seed=1), picture(20, 90, seed=2), picture(70, 70, "L", seed=3)
    asked = [turn("what is in ", first, " here")]
    return [
        asked,
        [turn("and what ", first, " is not")],
        [turn(first, " beside ", second)],
        [*asked, {"role": "assistant", "content": "the cat sat"}, turn("and ", third)],
        [turn("one two three")],
    ]


def turn(*parts: str | Image.Image) -> Turn:
    if len(parts) == 1 and isinstance(parts[0], str):
        return {"role": "user", "content": parts[0]}
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
            for part in parts
        ],
    }


def images_in(conversation: list[Turn]) -> list[Image.Image]:
    parts = [part for one in conversation if isinstance(one["content"], list) for part in one["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def wanted_of(model: Seeing) -> list[list[int]]:
    asked = conversations()
    wanted = [reference_chat(model, one, images_in(one), NUM_TOKENS) for one in asked]
    assert len(set(map(tuple, wanted))) > len(wanted) // 2
    return wanted


def said(llm: LLM, asked: list[list[Turn]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs: list[RequestOutput] = llm.chat(asked, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("kind", [*_APART, *map(long, sorted(set(KINDS) - set(_APART)))])
def test_conversations(kind: str) -> None:
    """In one batch, one after the other, and again where all of it is cached."""
    check_conversations(seeing(kind))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "language"), [("mistral3", "ministral3"), ("mistral3", "mistral4")])
def test_conversations_with_other_language_models(kind: str, language: str) -> None:
    check_conversations(seeing(kind, language=language))


def check_conversations(model: Seeing) -> None:
    wanted = wanted_of(model)
    with tiny_engine(model.folder, max_num_batched_tokens=128, max_num_seqs=8) as llm:
        assert said(llm, conversations()) == wanted
        for _ in range(2):
            assert [said(llm, [one])[0] for one in conversations()] == wanted


def test_next_turns_find_what_is_cached() -> None:
    model = seeing("qwen3-vl")
    asked = conversations()
    with tiny_engine(model.folder) as llm:
        (first,) = llm.chat([asked[0]], GREEDY, use_tqdm=False)
        assert first.usage.num_cached_tokens == 0
        (same,) = llm.chat([asked[0]], GREEDY, use_tqdm=False)
        assert same.usage.num_cached_tokens > len(first.prompt_token_ids) - 32
        (later,) = llm.chat([asked[3]], GREEDY, use_tqdm=False)
        assert later.usage.num_cached_tokens > len(first.prompt_token_ids) - 32
        (other,) = llm.chat([[turn("what is in ", picture(61, 43, seed=9), " here")]], GREEDY, use_tqdm=False)
        assert other.usage.num_cached_tokens < same.usage.num_cached_tokens / 2
        assert (same.outputs[0].token_ids, later.outputs[0].token_ids) == tuple(wanted_of(model)[i] for i in (0, 3))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3-vl", {"max_num_batched_tokens": 19, "max_num_seqs": 3, "kv_cache_memory": 1 << 20}),
        ("qwen3-vl", {"tensor_parallel_size": 2}),
        ("gemma3", {"max_num_batched_tokens": 19, "max_num_seqs": 3, "kv_cache_memory": 1 << 18}),
        long(
            "gemma3",
            {"tensor_parallel_size": 2, "deterministic": True, "max_num_batched_tokens": 80, "max_num_seqs": 8},
        ),
        long("gemma4", {"max_num_batched_tokens": 79, "max_num_seqs": 3, "kv_cache_memory": 1 << 20}),
        long("gemma4-told", {"tensor_parallel_size": 2, "max_num_batched_tokens": 19, "max_num_seqs": 3}),
        long("internvl", {"tensor_parallel_size": 2, "max_num_batched_tokens": 19, "max_num_seqs": 3}),
        long("glm4v", {"tensor_parallel_size": 2, "max_num_batched_tokens": 19, "max_num_seqs": 3}),
        long("glm4v-moe", {"tensor_parallel_size": 2, "kv_cache_memory": 1 << 20}),
        long("qwen2.5-vl", {"tensor_parallel_size": 2}),
        long("qwen3-vl", {"data_parallel_size": 2}),
        long("qwen3.5", {"tensor_parallel_size": 2, "max_num_batched_tokens": 68, "max_num_seqs": 4}),
    ],
)
def test_what_must_not_matter(kind: str, options: dict[str, Any]) -> None:
    model = seeing(kind)
    with tiny_engine(model.folder, **options) as llm:
        for _ in range(2):
            assert said(llm, conversations()) == wanted_of(model)


@pytest.mark.parametrize(
    ("kind", "tries"),
    [
        ("qwen3.5", {"method": "mtp"}),
        long("qwen3-vl", {"method": "ngram", "prompt_lookup_min": 1}),
        long("gemma3", {"method": "ngram", "prompt_lookup_min": 1}),
        long("internvl", {"method": "ngram", "prompt_lookup_min": 1}),
        long("glm4v", {"method": "ngram", "prompt_lookup_min": 1}),
    ],
)
def test_tokens_that_are_tried_ahead(kind: str, tries: dict[str, Any]) -> None:
    """Answers go on behind images from where guesses were right: of few tokens, some are."""
    model = seeing_guesser() if kind == "qwen3.5" else seeing(kind)
    many = structs.replace(GREEDY, max_tokens=40)
    few = structs.replace(many, logit_bias=dict.fromkeys(range(40, 60), 100))
    with tiny_engine(model.folder) as llm:
        wanted = [said(llm, conversations(), params) for params in (many, few)]
    assert [answer[:NUM_TOKENS] for answer in wanted[0]] == wanted_of(model)
    with tiny_engine(model.folder, speculative_config={**tries, "num_speculative_tokens": 3}) as llm:
        assert [said(llm, conversations(), params) for params in (many, few)] == wanted
        assert [said(llm, [one], few)[0] for one in conversations()[:3]] == wanted[1][:3]
        gauges = settled(llm)
    assert gauges.num_right_guesses > 0


@pytest.mark.parametrize("name", ["worker", long("scheduler"), long("tokenizer")])
async def test_answers_go_on_when_processes_die(name: str) -> None:
    """What was seen is gone with a worker, and is looked at again."""
    model, long_answers = seeing("qwen3-vl"), structs.replace(GREEDY, max_tokens=60)
    asked = [[ChatMessage(one["role"], one["content"]) for one in turns] for turns in conversations()[:3]]
    got: list[list[int]] = [[] for _ in asked]
    with tiny_engine(model.folder) as llm:
        (process,) = children(llm._engine.process.pid, name)

        async def stream(client: Client, index: int) -> None:
            async for piece in client.stream(asked[index], long_answers):
                got[index] += piece.token_ids

        with anyio.fail_after(60):
            async with Client(llm.address) as client, anyio.create_task_group() as tasks:
                for index in range(len(asked)):
                    tasks.start_soon(stream, client, index)
                while min(map(len, got)) < 3:
                    await anyio.sleep(0.005)
                process.kill()
                assert max(map(len, got)) < 60
        assert got == await anyio.to_thread.run_sync(said, llm, conversations()[:3], long_answers)
    assert [answer[:NUM_TOKENS] for answer in got] == wanted_of(model)[:3]


@pytest.mark.parametrize("kind", ["qwen3-vl", long("internvl"), long("glm4v")])
def test_other_weights(kind: str) -> None:
    """Of what sees, too."""
    one, other = seeing(kind), seeing(kind, seed=4)
    with tiny_engine(one.folder) as llm:
        assert said(llm, conversations()) == wanted_of(one)
        llm.update_weights(str(other.folder))
        assert said(llm, conversations()) == wanted_of(other)


def test_images_have_to_fit_a_step() -> None:
    with (
        pytest.raises(StartupFailed, match=r"want at least 25: .*wants an image's tokens in one step; --limit-mm"),
        tiny_engine(seeing("gemma3").folder, max_num_batched_tokens=24, max_num_seqs=9),
    ):
        pass


def test_an_engine_for_text_alone() -> None:
    with tiny_engine(seeing("qwen3-vl").folder, limit_mm_per_prompt={"image": 0}) as llm:
        assert said(llm, conversations()[-1:]) == wanted_of(seeing("qwen3-vl"))[-1:]
        with pytest.raises(RequestRefused, match="limit-mm-per-prompt"):
            said(llm, conversations()[:1])
