"""`LLM` with images, over a whole engine whose worker computes nothing: what it takes, and what it says of prompts."""

from collections.abc import Iterator
from typing import Any

import pytest

from seeing import IMAGE_TOKEN, PAD, encoded, picture, seeing_checkpoint
from tercet.engine import llm_pictures
from tercet.engine.llm import LLM
from tercet.ipc.beam_search import BeamSearchParams
from tercet.ipc.client import Overloaded, RequestRefused
from tercet.ipc.messages import ChatMessage, SamplingParams

SHORT = SamplingParams(max_tokens=2)
WIDE, TALL = picture(84, 56), encoded(picture(28, 112))
"""Of six tokens, and of four."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = seeing_checkpoint(tmp_path_factory.mktemp("seeing"))
    with LLM(folder, load_format="null", device="cpu", max_model_len=200) as llm:
        yield llm


def test_conversations_and_texts(llm: LLM) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image", "image": WIDE}, {"type": "image", "image": TALL}]
    turns: Any = (
        [{"role": "user", "content": parts}],
        [ChatMessage("user", tuple(parts[1:]))],
        [{"role": "user", "content": "x"}],
    )  # type: ignore[arg-type]
    outputs = llm.chat(turns, SHORT, use_tqdm=False)
    assert [one.prompt_token_ids.count(IMAGE_TOKEN) for one in outputs] == [10, 10, 0]
    assert [one.usage.num_prompt_tokens - len(one.prompt_token_ids) for one in outputs] == [0, 0, 0]
    prompts: Any = [{"prompt": f"x{PAD}", "multi_modal_data": {"image": WIDE}}, "y"]
    outputs = llm.generate(prompts, SHORT, use_tqdm=False)
    assert [(one.prompt, one.prompt_token_ids.count(IMAGE_TOKEN)) for one in outputs] == [(f"x{PAD}", 6), ("y", 0)]
    assert llm.generate(prompts[0], SHORT, use_tqdm=False)[0].prompt_token_ids == outputs[0].prompt_token_ids


def test_what_is_wrong_is_said(llm: LLM) -> None:
    with pytest.raises(RequestRefused, match="places for 0 images"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": WIDE}}, SHORT, use_tqdm=False)
    with pytest.raises(ValueError, match="content has 'x'"):
        llm.chat([{"role": "user", "content": ["x"]}], SHORT, use_tqdm=False)
    for ask in (
        llm.embed,
        llm.classify,
        lambda prompt: llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2)),
    ):
        with pytest.raises(TypeError, match="got a prompt with images; want texts or token ids here"):
            ask({"prompt": PAD, "multi_modal_data": {"image": WIDE}})  # type: ignore[operator]


async def test_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_pictures, "_RETRY_S", 0.0)
    codes = ["overloaded", "overloaded", "asleep"]

    async def ask() -> None:
        raise Overloaded(codes.pop(0), "")

    with pytest.raises(Overloaded) as error:
        await llm_pictures.patiently(ask)
    assert (error.value.code, codes) == ("asleep", [])
