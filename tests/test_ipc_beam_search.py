"""Beam search: the sequences and scores of transformers' own `generate(num_beams=…)`, through a whole engine."""

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from checkpoints import checkpoint, make_checkpoint, random_prompts, reference_greedy, reference_model, tokenizer
from families import VOCAB_SIZE
from tercet.engine.llm import LLM
from tercet.ipc.beam_search import Beam, BeamSearch, BeamSearchParams, beam_search
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.messages import ChatMessage, SamplingParams
from whole_engine import PAGE_SIZE, wait_until_empty

CLOSE = {"abs": 5e-4}
PROMPTS = random_prompts(4, 1, 70, seed=53)


@functools.cache
def eos_ids() -> list[int]:
    """Ends that answers come to: tokens out of the middle of what the model would say."""
    answers = reference_greedy(checkpoint("qwen3"), PROMPTS, 16)
    return [2, *(answer[4 + 3 * index] for index, answer in enumerate(answers))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with several ways to end an answer."""
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("beams"), eos_token_id=eos_ids())


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", page_size=PAGE_SIZE, kv_cache_memory=32 << 20) as llm:
        yield llm


@torch.inference_mode()
def expected(model: Any, prompt: Sequence[int], params: BeamSearchParams) -> list[tuple[float, list[int]]]:
    """Scores and answers of transformers, without padding."""
    torch.set_num_threads(1)
    ids = torch.tensor([prompt])
    eos = None if params.ignore_eos else eos_ids()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = [cut(row[len(prompt) :].tolist(), eos or []) for row in out.sequences]
    return list(zip(out.sequences_scores.tolist(), answers, strict=True))


def cut(answer: list[int], eos: list[int]) -> list[int]:
    ends = [place for place, token_id in enumerate(answer) if token_id in eos]
    return answer[: ends[0] + 1] if ends else answer


def check(beams: Sequence[Beam], wanted: list[tuple[float, list[int]]], params: BeamSearchParams) -> None:
    assert [beam.token_ids for beam in beams] == [answer for _, answer in wanted]
    assert [beam.score for beam in beams] == pytest.approx([score for score, _ in wanted], **CLOSE)
    for beam in beams:
        by_eos = beam.token_ids[-1] in eos_ids() and not params.ignore_eos
        assert beam.reason == ("stop" if by_eos else "length")
        assert beam.logprob == pytest.approx(beam.score * len(beam.token_ids) ** params.length_penalty)
        assert beam.text == tokenizer().decode(beam.token_ids[:-1] if by_eos else beam.token_ids)


CASES = [
    BeamSearchParams(beam_width=3, max_tokens=20),
    BeamSearchParams(beam_width=5, max_tokens=24, early_stopping=True),
    BeamSearchParams(beam_width=4, max_tokens=12, early_stopping="never", length_penalty=2.0),
    BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=-1.0),
    BeamSearchParams(beam_width=15, max_tokens=6, length_penalty=0.0, early_stopping="never"),
    BeamSearchParams(beam_width=6, max_tokens=10, ignore_eos=True),
]


@pytest.mark.parametrize("params", CASES, ids=lambda p: f"{p.beam_width}-{p.early_stopping}-{p.length_penalty:g}")
def test_as_transformers_does(engine: LLM, folder: Path, params: BeamSearchParams) -> None:
    model = reference_model(folder)
    for prompt, beams in zip(PROMPTS, engine.beam_search(PROMPTS, params), strict=True):
        check(beams, expected(model, prompt, params), params)
    wait_until_empty(engine.address)


def test_some_answers_end_by_themselves_and_some_do_not(engine: LLM) -> None:
    """What the comparison above is worth."""
    found = engine.beam_search(PROMPTS, BeamSearchParams(beam_width=5, max_tokens=24, early_stopping="never"))
    reasons = {beam.reason for beams in found for beam in beams}
    lengths = {len(beam.token_ids) for beams in found for beam in beams}
    assert reasons == {"stop", "length"}
    assert len(lengths) > 3


def test_one_beam_is_the_greedy_answer(engine: LLM) -> None:
    found = engine.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=12))
    greedy = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, logprobs=0), use_tqdm=False)
    for (beam,), output in zip(found, greedy, strict=True):
        (completion,) = output.outputs
        assert beam.token_ids == completion.token_ids
        assert beam.logprob == pytest.approx(completion.cumulative_logprob, **CLOSE)
        assert beam.reason == completion.finish_reason


async def test_texts_and_conversations(engine: LLM, folder: Path) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    conversation = [ChatMessage("user", "naïve café?")]
    rendered = tokenizer().apply_chat_template(
        [{"role": "user", "content": "naïve café?"}], add_generation_prompt=True, tokenize=False
    )
    model = reference_model(folder)
    async with Client(engine.address) as client:
        for prompt, text in (("the cat sat", "the cat sat"), (conversation, rendered)):
            ids = tokenizer().encode(text, add_special_tokens=False)
            check(await beam_search(client, prompt, params, cache_salt="mine"), expected(model, ids, params), params)


async def test_who_stops_waiting_ends_the_search(engine: LLM) -> None:
    async with Client(engine.address) as client:
        with anyio.move_on_after(0.3) as scope:
            await beam_search(client, PROMPTS[0], BeamSearchParams(beam_width=8, max_tokens=400, ignore_eos=True))
        assert scope.cancelled_caught
    await anyio.to_thread.run_sync(wait_until_empty, engine.address)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (BeamSearchParams(beam_width=0, max_tokens=5), "beam_width is 0; want 1 to 15"),
        (BeamSearchParams(beam_width=16, max_tokens=5), "beam_width is 16; want 1 to 15"),
        (BeamSearchParams(beam_width=21, max_tokens=5, ignore_eos=True), "beam_width is 21; want 1 to 20"),
        (BeamSearchParams(beam_width=2, max_tokens=0), "max_tokens is 0; want at least 1"),
        (BeamSearchParams(beam_width=2, max_tokens=1, length_penalty=float("nan")), "length_penalty is nan; want -10"),
        (BeamSearchParams(beam_width=2, max_tokens=1, early_stopping="ever"), "early_stopping is 'ever'"),  # type: ignore[arg-type]
    ],
)
def test_bad_parameters(engine: LLM, params: BeamSearchParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.beam_search(PROMPTS, params)


def test_bad_prompts(engine: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=500)
    with pytest.raises(RequestRefused, match=r"max_tokens is 500; want at most 492: .* is 512, .* has 20"):
        engine.beam_search([[5] * 20], params)
    with pytest.raises(RequestRefused, match=f"prompt is token id {VOCAB_SIZE}"):
        engine.beam_search([[5, VOCAB_SIZE]], params)
    with pytest.raises(RequestRefused, match="prompt is no tokens"):
        engine.beam_search([[]], params)
    with pytest.raises(RequestRefused, match="context length is 512"):
        engine.beam_search([[5] * 512], params)
    wait_until_empty(engine.address)


# ------------------------------------------------------------------------------------------ the core alone


@pytest.mark.parametrize("seed", range(20))
def test_as_wide_as_the_tree_it_finds_the_best_of_all(seed: int) -> None:
    """Nothing is ever cut off then, so the answers are the best of every sequence there is."""
    generator = random.Random(seed)
    end, depth, penalty = 0, 3, generator.choice([0.0, 0.5, 1.0, 2.0])
    likely: dict[tuple[int, ...], list[float]] = {}

    def after(ids: tuple[int, ...]) -> list[tuple[int, float]]:
        weights = likely.setdefault(ids, [generator.random() for _ in range(3)])
        return [(token, math.log(weight / sum(weights))) for token, weight in enumerate(weights)]

    def logprob(ids: tuple[int, ...]) -> float:
        return sum(dict(after(ids[:place]))[token] for place, token in enumerate(ids))

    whole = [
        ids
        for length in range(1, depth + 1)
        for ids in itertools.product(range(3), repeat=length)
        if end not in ids[:-1] and (length == depth or ids[-1] == end)
    ]
    assert len(whole) == 15
    settings = BeamSearchParams(beam_width=15, max_tokens=depth, length_penalty=penalty, early_stopping="never")
    search = BeamSearch(settings, [end])
    while search.live:
        search.advance([after(live.token_ids) for live in search.live])
    best = sorted(((logprob(ids) / len(ids) ** penalty, ids) for ids in whole), reverse=True)
    assert [one.token_ids for _, one in search.ended] == [ids for _, ids in best]
    assert [score for score, _ in search.ended] == pytest.approx([score for score, _ in best])
