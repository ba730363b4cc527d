"""A model that writes text made a reranker: its two tokens' logits are those of transformers, of texts in a template.

fp32 on the CPU, real processes.
"""

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import httpx
import jinja2
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from checkpoints import checkpoint, make_checkpoint, random_prompts, reference_model
from classifiers import classifier
from covering import long
from daemon import Daemon, free_port
from demo import demo_file
from tercet.engine.errors import StartupFailed, UnsupportedModel
from tercet.engine.llm import LLM
from tercet.engine.pair_template import PairTemplate
from tercet.ipc.answers import Classifier
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.messages import SamplingParams
from tercet.model.gguf_file import read_tokens
from tercet.model.load import open_for
from whole_engine import tiny_engine

TEMPLATE = (
    "{{ bos_token }}system\nIs the document about the query?{{ eos_token }}\n"
    "{%- set asked = messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first %}\n"
    "<Query>: {{ asked }}\n<Document>: {{ document }}<|im_end|>\n<|im_start|>assistant\n"
)
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "went", "home", "again", "when", "rain", "came", "down"]


def next_logits(path: Path, prompts: list[list[int]]) -> torch.Tensor:
    model = reference_model(path)
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        long("qwen3", {}),
        ("gemma2", {"max_num_batched_tokens": 11, "max_num_seqs": 4}),  # with a soft cap
        long("granite", {}),  # logits are divided
        long("qwen2", {"tensor_parallel_size": 2}),
    ],
)
@pytest.mark.parametrize("num_labels", [2, long(1)])
def test_logits_are_those_of_transformers(family: str, options: dict[str, Any], num_labels: int) -> None:
    path = checkpoint(family)
    vocabulary = AutoTokenizer.from_pretrained(path).convert_ids_to_tokens
    first, second = random.sample(range(10, 90), 2)
    prompts = random_prompts(12, 1, 60, seed=random.randrange(2**31))
    logits = next_logits(path, prompts)

    async def ask(address: str) -> tuple[list[Any], Any]:
        async with Client(address) as client:
            greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            work = [*(client.classify(prompt) for prompt in prompts), client.generate(prompts[0], greedy)]
            *made, answer = await asyncio.gather(*work)
            return made, answer

    tokens = tuple(map(vocabulary, (first, second)[:num_labels]))
    wanted = logits[:, second] - logits[:, first] if num_labels == 2 else logits[:, first]
    with tiny_engine(path, classifier_tokens=tokens, **options) as llm:
        assert llm.classifier == Classifier((tokens[-1],), "sigmoid")
        made, answer = asyncio.run(ask(llm.address))
    got = np.array([one.logits[0] for one in made])
    np.testing.assert_allclose(got, wanted.numpy(), rtol=2e-4, atol=2e-4 * float(logits.abs().max()))
    assert answer.token_ids == [int(logits[0].argmax())]  # it goes on writing


def test_a_reranker_behind_http(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", seed=random.randrange(2**20), max_position_embeddings=2048)
    tokenizer = AutoTokenizer.from_pretrained(model)
    file = tmp_path / "pair.jinja"
    file.write_text(TEMPLATE)
    query = "which cat came home"
    documents = [" ".join(random.choices(WORDS, k=random.randint(1, 30))) for _ in range(6)]
    texts = [
        jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        .from_string(TEMPLATE)
        .render(
            bos_token="<|im_start|>",
            eos_token="<|im_end|>",
            document=document,
            messages=[{"role": "query", "content": query}, {"role": "document", "content": document}],
        )
        for document in documents
    ]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    no, yes = tokenizer.convert_tokens_to_ids(["Ġ", "a"])
    logits = next_logits(model, prompts)
    wanted = [1 / (1 + math.exp(float(row[no] - row[yes]))) for row in logits]
    flags = ["--device", "cpu", "--kv-cache-memory", "16MiB", "--http", f"127.0.0.1:{free_port()}"]
    flags += ["--pair-template", str(file), "--classifier-tokens", " ", "a"]
    with Daemon(str(model), *flags) as daemon, httpx.Client(base_url=daemon.http, timeout=60) as http:
        answer = http.post("/v1/rerank", json={"query": query, "documents": documents}).json()
        for result in answer["results"]:
            assert result["relevance_score"] == pytest.approx(wanted[result["index"]], abs=2e-4)
        order = [result["index"] for result in answer["results"]]
        assert order == sorted(range(6), key=lambda index: -wanted[index])
        assert answer["usage"]["prompt_tokens"] == sum(map(len, {tuple(prompt) for prompt in prompts}))
        score = http.post("/v1/score", json={"text_1": query, "text_2": documents[0]}).json()
        assert score["data"][0]["score"] == pytest.approx(wanted[0], abs=2e-4)
        alone = http.post("/classify", json={"input": query}).json()["data"][0]  # no pair: as it is
        (row,) = next_logits(model, [tokenizer.encode(query)])
        assert (alone["label"], alone["num_classes"]) == ("a", 1)
        assert alone["probs"][0] == pytest.approx(1 / (1 + math.exp(float(row[no] - row[yes]))), abs=2e-4)
        said = http.post("/v1/completions", json={"prompt": "the", "max_tokens": 2}).json()
        assert said["choices"][0]["text"] is not None


def test_the_vocabulary_of_a_gguf_file() -> None:
    tokens = read_tokens(demo_file())
    asked = (" no", "Ġyes")
    config = open_for(demo_file(), torch.device("cpu"), label_tokens=asked).config
    assert [tokens[token_id] for token_id in config.label_tokens] == ["Ġno", "Ġyes"]


@pytest.mark.long
def test_a_gguf_file() -> None:
    """What it says of two tokens is what it says of them where they come next."""
    question = "Is Paris in France? Answer yes or no:"
    with LLM(str(demo_file()), device="cpu", classifier_tokens=(" no", " yes"), kv_cache_memory=64 << 20) as llm:
        assert llm.classifier == Classifier((" yes",), "sigmoid")
        (made,) = llm.classify(question)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([question + " yes", question + " no"], params, use_tqdm=False)
    yes, no = (next(iter(output.prompt_logprobs[-1].values())).logprob for output in outputs)
    assert made.logits[0] == pytest.approx(yes - no, abs=1e-3)


@pytest.mark.parametrize(
    ("family", "tokens", "message"),
    [
        (
            "qwen3",
            ("a", "nothing-like-this"),
            r"got 'nothing-like-this', which is no token of this model; want a whole",
        ),
        ("qwen3", ("Ġ", " "), r"got Ġ  ; want different tokens"),
        ("classifier", ("a",), r"got a; want nothing: this model has a head that classifies"),
        ("no tokenizer", ("a",), r"wants a tokenizer\.json in .*, which has none"),
        ("no vocabulary", ("a",), r"tokenizer\.json has no vocabulary that can be read: KeyError"),
    ],
)
def test_tokens_that_cannot_be(family: str, tokens: tuple[str, ...], message: str, tmp_path: Path) -> None:
    if family == "classifier":
        classifier("qwen3", tmp_path, seed=1)
    else:
        make_checkpoint("qwen3", tmp_path)
    if family == "no tokenizer":
        (tmp_path / "tokenizer.json").unlink()
    elif family == "no vocabulary":
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}))
    with pytest.raises(ValueError, match=message):
        open_for(tmp_path, torch.device("cpu"), label_tokens=tokens)


def test_vocabularies_of_several_kinds(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    unigram = {"vocab": [["<unk>", 0.0], ["▁yes", -1.0], ["yes", -2.0]]}
    added = [{"id": 7, "content": "<|yes|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": unigram, "added_tokens": added}))
    for tokens, ids in (((" yes",), (1,)), (("yes", "▁yes"), (2, 1)), (("<|yes|>", "yes"), (7, 2))):
        assert open_for(tmp_path, torch.device("cpu"), label_tokens=tokens).config.label_tokens == ids


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ query }}", r"does not show a document; want both texts"),
        ("{{ query ", r"pair\.jinja cannot be used: unexpected end of template"),
        (b"\xff", r"pair\.jinja cannot be read: "),
        (None, r"pair\.jinja cannot be read: .*No such file"),
    ],
)
def test_templates_that_cannot_be(template: str | bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "pair.jinja"
    if template is not None:
        file.write_bytes(template if isinstance(template, bytes) else template.encode())
    with pytest.raises(UnsupportedModel, match=message):
        PairTemplate(file, {})


def test_a_template_that_refuses_a_text(tmp_path: Path) -> None:
    file = tmp_path / "pair.jinja"
    file.write_text("{% if 'no' in document %}{{ raise_exception('not that') }}{% endif %}{{ query }}{{ document }}")
    options = {"classifier_tokens": ("a",), "pair_template": str(file)}

    async def ask(address: str) -> Any:
        async with Client(address) as client:
            with pytest.raises(RequestRefused, match="the pair template refused the messages: not that"):
                await client.classify("a", pair="no")
            return await client.classify("a", pair="yes")

    with tiny_engine("qwen3", **options) as llm:
        assert len(asyncio.run(ask(llm.address)).logits) == 1
    with pytest.raises(StartupFailed, match="--pair-template is for a model that classifies, and this one does not"):
        tiny_engine("qwen3", pair_template=str(file))


def test_flags_are_checked() -> None:
    with pytest.raises(ValueError, match=r"--classifier-tokens got 'a' 'b' 'c'; want one token, or two"):
        LLM("demo", classifier_tokens=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"--classifier-tokens got ''; want one token"):
        LLM("demo", classifier_tokens=("",))
    with pytest.raises(ValueError, match=r"--classifier-tokens came with --load-format null"):
        LLM("demo", classifier_tokens=("a",), load_format="null")
