"""Log-probabilities by the whole engine: those of transformers' own logits, of answers and of prompts, whatever the
engine does meanwhile, through `LLM`, `Client` and a socket."""

from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import pytest
import torch

from checkpoints import checkpoint, random_prompts, reference_model, tokenizer
from raw_client import RawClient
from tercet.engine.llm import LLM, RequestOutput
from tercet.ipc.answers import TokenLogprob
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams
from tercet.ipc.prompt import pack_ids
from whole_engine import disturbances, tiny_engine, wait_until_empty

pytestmark = pytest.mark.usefixtures("nan_memory")

FAMILY = "llama3"
NUM_TOKENS = 20
PROMPTS = random_prompts(9, 1, 90, seed=41)
CLOSE = {"abs": 2e-4}


def params_of(index: int) -> SamplingParams:
    """Some ask for log-probabilities, some for changes that these must not show, some for neither."""
    return SamplingParams(
        temperature=(0.0, 0.9)[index // 3 % 2],
        seed=index,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=(None, 0, 3, 20)[index % 4],
        prompt_logprobs=(2, None, 0)[index % 3],
        presence_penalty=(0.0, 1.5)[index // 2 % 2],
        top_k=(0, 5)[index % 2],
    )


@torch.inference_mode()
def reference(ids: Sequence[int], family: str = FAMILY) -> torch.Tensor:
    """Row i: log-probabilities of what follows the first i + 1 tokens."""
    torch.set_num_threads(1)
    return reference_model(checkpoint(family))(torch.tensor([list(ids)])).logits[0].double().log_softmax(-1)


def check_row(row: Sequence[TokenLogprob], expected: torch.Tensor, token_id: int, num_top: int) -> None:
    own, *others = row
    assert own.token_id == token_id
    assert own.logprob == pytest.approx(float(expected[token_id]), **CLOSE)
    assert own.rank == int((expected > expected[token_id]).sum()) + 1
    assert [other.rank for other in others] == list(range(1, num_top + 1))
    best, ids = expected.topk(num_top)
    assert [other.token_id for other in others] == ids.tolist()
    assert [other.logprob for other in others] == pytest.approx(best.tolist(), **CLOSE)
    for one in row:
        if "\N{REPLACEMENT CHARACTER}" not in one.text:
            assert one.text == tokenizer().decode([one.token_id])


def check_dict(row: dict[int, TokenLogprob], expected: torch.Tensor, token_id: int, num_top: int) -> None:
    """As vLLM has it: by id, the token itself among them."""
    assert set(row) == {token_id, *expected.topk(num_top).indices.tolist()}
    for other, one in row.items():
        assert one.token_id == other
        assert one.logprob == pytest.approx(float(expected[other]), **CLOSE)
        assert one.rank == int((expected > expected[other]).sum()) + 1


def check_output(prompt: list[int], params: SamplingParams, output: RequestOutput, family: str = FAMILY) -> None:
    (completion,) = output.outputs
    assert len(completion.token_ids) == NUM_TOKENS
    expected = reference(prompt + completion.token_ids, family)
    if params.logprobs is None:
        assert completion.logprobs is None
        assert completion.cumulative_logprob is None
    else:
        assert completion.logprobs is not None
        total = 0.0
        for i, (row, token_id) in enumerate(zip(completion.logprobs, completion.token_ids, strict=True)):
            check_dict(row, expected[len(prompt) - 1 + i], token_id, params.logprobs)
            total += float(expected[len(prompt) - 1 + i, token_id])
        assert completion.cumulative_logprob == pytest.approx(total, abs=5e-3)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    assert output.prompt_logprobs is not None
    first, *rest = output.prompt_logprobs
    assert first is None
    for i, (row, token_id) in enumerate(zip(rest, prompt[1:], strict=True)):
        assert row is not None
        check_dict(row, expected[i], token_id, params.prompt_logprobs)


@pytest.fixture(scope="module")
def engine(nan_memory: None) -> Iterator[LLM]:
    with tiny_engine(FAMILY, max_num_seqs=6) as llm:
        yield llm


def test_among_others_and_after_prefix_hits(engine: LLM) -> None:
    params = [params_of(index) for index in range(len(PROMPTS))]
    for again in (False, True):
        outputs = engine.generate(PROMPTS, params, use_tqdm=False)
        for prompt, one, output in zip(PROMPTS, params, outputs, strict=True):
            check_output(prompt, one, output)
            if one.prompt_logprobs is not None:
                assert output.usage.num_cached_tokens == 0
            elif again:
                assert output.usage.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    wait_until_empty(engine.address)


def under_disturbance(family: str, options: dict[str, Any]) -> None:
    params = [params_of(index) for index in range(len(PROMPTS))]
    with tiny_engine(family, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, one, output in zip(PROMPTS, params, outputs, strict=True):
        check_output(prompt, one, output, family)
    if "kv_cache_memory" in options:
        assert sum(output.usage.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("options", disturbances(FAMILY))
def test_under_disturbance(options: dict[str, Any]) -> None:
    under_disturbance(FAMILY, options)


@pytest.mark.long
@pytest.mark.parametrize("options", disturbances("minicpm3"))
def test_of_a_model_with_latents(options: dict[str, Any]) -> None:
    under_disturbance("minicpm3", options)


async def test_streamed(engine: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    async with Client(engine.address) as client:
        with anyio.fail_after(30):
            pieces = [piece async for piece in client.stream(PROMPTS[4], params)]
    token_ids, position = [], len(PROMPTS[4]) - 1
    expected = reference(PROMPTS[4] + [token for piece in pieces for token in piece.token_ids])
    for piece in pieces:
        assert piece.logprobs is not None
        for token_id, row in zip(piece.token_ids, piece.logprobs, strict=True):
            check_row(row, expected[position + len(token_ids)], token_id, 2)
            token_ids.append(token_id)
    generation = pieces[-1].generation
    assert generation is not None
    assert generation.logprobs == [row for piece in pieces for row in piece.logprobs or []]


def test_through_a_socket(engine: LLM) -> None:
    """Each `Logprobs` says of the tokens of the message behind it; pieces of the prompt come before any token."""
    prompt = PROMPTS[5]
    params = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 1}
    of_prompt: list[Any] = []
    rows: list[Any] = []
    ids: list[int] = []
    with RawClient(engine.address) as client:
        client.ask("GenerateIds", "a", pack_ids(prompt), params)
        for kind, name, *fields in client.items():
            assert name == "a"
            if kind == "PromptLogprobs":
                assert fields[0] == 1 + len(of_prompt)
                assert not ids
                of_prompt += fields[1]
            elif kind == "Logprobs":
                rows += fields[0]
            else:
                ids += memoryview(fields[1]).cast("i").tolist()
                assert len(ids) == len(rows)
            if kind == "Finished":
                break
    expected = reference(prompt + ids)
    for i, (row, token_id) in enumerate(zip(of_prompt + rows, prompt[1:] + ids, strict=True)):
        check_row([TokenLogprob(*one) for one in row], expected[i], token_id, 1)


def test_a_stop_string_cuts_no_log_off(engine: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (whole,) = engine.generate(PROMPTS[2], plain, use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop=stop, logprobs=0)
    (output,) = engine.generate(PROMPTS[2], params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.finish_reason == "stop"
    assert completion.logprobs is not None
    assert [list(row) for row in completion.logprobs] == [[token_id] for token_id in completion.token_ids]
