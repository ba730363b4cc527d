"""Answers of adapters are what transformers says with each merged into the weights, whatever runs beside them. fp32 on
the CPU, real processes."""

import itertools
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from adapter_folders import flags, make_adapter, merged_model, says
from checkpoints import checkpoint, random_prompts
from covering import long
from guessing_layers import guessing_checkpoint
from last_hidden import last_hidden, unit
from tercet.ipc.messages import EmbeddingParams, SamplingParams
from whole_engine import disturbances, generate, info, tiny_engine

FAMILY, NUM_TOKENS = "qwen3", 16
NAMES = (None, "sql", "poems")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path | None]:
    """By name."""
    scratch, seed = tmp_path_factory.mktemp("adapters"), random.randrange(10**6)
    print("seed", seed)
    made = [make_adapter(scratch / str(name), checkpoint(FAMILY), seed + index) for index, name in enumerate(NAMES[1:])]
    return dict(zip(NAMES, (None, *made), strict=True))


def asked(names: list[str | None], **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, adapter=name, **more) for name in names
    ]


@pytest.mark.parametrize(
    "options",
    [
        *disturbances(FAMILY),
        pytest.param({"deterministic": True}, id="deterministic"),
        pytest.param({"speculative_config": {"num_speculative_tokens": 3}}, id="guesses"),
    ],
)
def test_each_answers_as_if_alone(folders: dict[str | None, Path | None], options: dict[str, Any]) -> None:
    """The same prompts to each, twice: pages that one has left are found by it alone."""
    prompts = random_prompts(3, 20, 80, seed=random.randrange(2**31))
    torch.set_num_threads(1)
    cases = list(itertools.product(NAMES, range(len(prompts)))) * 2
    random.shuffle(cases)
    with tiny_engine(FAMILY, adapter=flags(folders), **options) as llm:
        got = generate(llm, [prompts[index] for _, index in cases], asked([name for name, _ in cases]))
        again = generate(llm, [prompts[index] for _, index in cases], asked([name for name, _ in cases]))
        while not info(llm.address).num_prefix_hits:  # told a few times a second
            time.sleep(0.05)
    assert again == got
    for name in NAMES:  # an adapter that always says the same would agree with anything
        assert len({tuple(ids) for (one, _), ids in zip(cases, got, strict=True) if one == name}) > 1
    models = {name: merged_model(checkpoint(FAMILY), folders[name]) for name in NAMES}
    for (name, index), ids in zip(cases, got, strict=True):
        assert all(says(models[other], prompts[index], ids) == (other == name) for other in NAMES), (name, index)


@pytest.mark.parametrize("family", ["qwen3.5", long("qwen3-next")])
def test_states_are_of_their_adapter(family: str, tmp_path: Path) -> None:
    """Copies of states serve who shares a prompt and an adapter; and guesses by the model's own layer change none."""
    path, seed = guessing_checkpoint(family, tmp_path / "model"), random.randrange(10**6)
    print("seed", seed)
    made = [
        make_adapter(tmp_path / str(name), path, seed + index, wanted=lambda module: module.startswith("model."))
        for index, name in enumerate(NAMES[1:])
    ]
    folders = dict(zip(NAMES, (None, *made), strict=True))
    (begin,) = random_prompts(1, 130, 130, seed=seed)
    prompts = [[*begin, *end] for end in random_prompts(3, 3, 30, seed=seed + 1)]
    cases = list(itertools.product(NAMES, range(len(prompts)))) * 2
    params = asked([name for name, _ in cases])
    tries = {"method": "mtp", "num_speculative_tokens": 2, "disable_by_batch_size": 4}
    with tiny_engine(path, adapter=flags(folders), speculative_config=tries, max_num_seqs=4) as llm:
        got = generate(llm, [prompts[index] for _, index in cases], params)
        while not info(llm.address).num_prefix_hits:  # told a few times a second
            time.sleep(0.05)
    models = {name: merged_model(path, folders[name]) for name in NAMES}
    for (name, index), ids in zip(cases, got, strict=True):
        assert all(says(models[other], prompts[index], ids) == (other == name) for other in NAMES), (name, index)


def test_what_else_a_request_may_want(folders: dict[str | None, Path | None]) -> None:
    """Log-probabilities of answers and prompts, several answers, embeddings."""
    prompts = random_prompts(6, 3, 60, seed=random.randrange(2**31))
    names = [*NAMES] * 2
    with tiny_engine(FAMILY, adapter=flags(folders)) as llm:
        outputs = llm.generate(prompts, asked(names, logprobs=0, prompt_logprobs=0), use_tqdm=False)
        sampled = [SamplingParams(seed=7, n=3, max_tokens=9, ignore_eos=True, adapter=name) for name in names]
        several = llm.generate(prompts, sampled, use_tqdm=False)
        alone = [
            generate(llm, [prompt], structs.replace(params, n=1, seed=7 + index))[0]
            for prompt, params in zip(prompts, sampled, strict=True)
            for index in range(3)
        ]
        embedded = llm.embed(prompts, [EmbeddingParams(adapter=name) for name in names])
    for name, prompt, output, embedding in zip(names, prompts, outputs, embedded, strict=True):
        model, completion = merged_model(checkpoint(FAMILY), folders[name]), output.outputs[0]
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.inference_mode():
            logs = model(ids).logits[0].log_softmax(-1)
        wanted = logs[torch.arange(len(ids[0]) - 1), ids[0, 1:]].tolist()
        assert output.prompt_logprobs is not None
        assert completion.logprobs is not None
        told = [each[token].logprob for each, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True) if each]
        told += [each[token].logprob for each, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        np.testing.assert_allclose(told, wanted, rtol=1e-3, atol=1e-3)
        (hidden,) = last_hidden(model, [prompt])
        np.testing.assert_allclose(embedding.values, unit(hidden), rtol=2e-4, atol=2e-5)
    assert [answer.token_ids for output in several for answer in output.outputs] == alone
