"""A whole engine with a tokenizer as of Llama 2 and Mistral: `▁` for the space, bytes for what the vocabulary lacks."""

import json
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from checkpoints import make_checkpoint
from families import VOCAB_SIZE
from tercet.engine.llm import LLM
from tercet.ipc.beam_search import BeamSearchParams
from tercet.ipc.client import Client, Piece
from tercet.ipc.messages import ChatMessage, SamplingParams
from whole_engine import PAGE_SIZE

PROMPTS = ["one two", "é, abc", "x\ny"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


def metaspace_tokenizer() -> Tokenizer:
    """Special tokens, bytes, and every letter with and without a space before it, and pairs of letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, ",", "[", "]", "/"]
    merges = [("▁", letter) for letter in letters]
    merges += [(left, right) for left in "aeiou" for right in letters]
    merges = merges[: VOCAB_SIZE - len(tokens)]
    tokens += [left + right for left, right in merges]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in tokens[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint("mistral", tmp_path_factory.mktemp("metaspace"))
    metaspace_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", page_size=PAGE_SIZE, kv_cache_memory=8 << 20) as llm:
        yield llm


def added(folder: Path, prompt_ids: list[int], token_ids: list[int], *, skip: bool = True) -> str:
    """What transformers says that these tokens add to their prompt's text."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    before, whole = (tokenizer.decode(ids, skip_special_tokens=skip) for ids in (prompt_ids, prompt_ids + token_ids))
    assert whole.startswith(before)
    return whole.removeprefix(before)


def spaced(deal: float) -> dict[int, float]:
    """A bias: most answers begin with a word of their own."""
    return {i: deal for token, i in metaspace_tokenizer().get_vocab().items() if token.startswith("▁")}


def test_an_answer_goes_on_from_its_prompt(folder: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=3, n=8, max_tokens=12, ignore_eos=True, logit_bias=spaced(5))
    num_spaces = 0
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        assert output.prompt is not None
        prompt_ids = metaspace_tokenizer().encode(output.prompt).ids
        for answer in output.outputs:
            assert answer.text == added(folder, prompt_ids, answer.token_ids)
            num_spaces += answer.text.startswith(" ")
    assert num_spaces > 12


def test_a_reply_s_text_is_that_of_its_tokens(folder: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, logit_bias=spaced(50))

    async def stream() -> list[Piece]:
        async with Client(llm.address) as client:
            return [piece async for piece in client.stream([ChatMessage("user", "abc")], params)]

    pieces = anyio.run(stream)
    text = "".join(piece.text for piece in pieces)
    prompt_ids = metaspace_tokenizer().encode("<s>[INST] abc [/INST]", add_special_tokens=False).ids
    assert text == added(folder, prompt_ids, [token_id for piece in pieces for token_id in piece.token_ids])
    assert text == "".join(row[0].text for piece in pieces for row in piece.logprobs or ())
    assert text.startswith(" ")


def test_a_form_that_begins_with_a_space(llm: LLM) -> None:
    params = SamplingParams(temperature=0, structured={"choice": [" ab", " c"]})  # type: ignore[arg-type]
    (output,) = llm.generate(["one two"], params, use_tqdm=False)
    assert output.outputs[0].text in (" ab", " c")


def test_beams_go_on_from_their_prompt(folder: Path, llm: LLM) -> None:
    prompts = [word * count for word in ("one two", "x", "é, abc") for count in range(1, 5)]
    params = BeamSearchParams(beam_width=8, max_tokens=3, ignore_eos=True)
    num_spaces = 0
    for prompt, beams in zip(prompts, llm.beam_search(prompts, params), strict=True):
        prompt_ids = metaspace_tokenizer().encode(prompt).ids
        for beam in beams:
            assert beam.text == added(folder, prompt_ids, beam.token_ids, skip=False)
            num_spaces += beam.text.startswith(" ")
    assert num_spaces
