"""The decoder against transformers in fp32: every family, whole and chunked prefill, decode, mixed steps, ranks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import checkpoint, likeliest, random_prompts, reference_model
from covering import long
from families import FAMILIES
from paged_sequences import Sequences, make_decoder

pytestmark = pytest.mark.usefixtures("one_thread")


def each_family_and_layout() -> Iterator[Any]:
    """Each family as it is served and in one of the other layouts, which stand for each other."""
    for index, family in enumerate(FAMILIES):
        yield family, "reordered"
        for other, layout in enumerate(("fused", "plain")):
            yield (family, layout) if index % 2 == other else long(family, layout)


def reference_logits(path: Path, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference_model(path)(torch.tensor([ids])).logits[0]
    return logits


def assert_close(ours_V: Tensor, theirs_V: Tensor) -> None:
    torch.testing.assert_close(ours_V, theirs_V, rtol=1e-4, atol=1e-4 * float(theirs_V.abs().max()))


@pytest.mark.parametrize(("family", "layout"), list(each_family_and_layout()))
def test_logits_whole_chunked_decoded_mixed(family: str, layout: str) -> None:
    path = checkpoint(family)
    run = Sequences(make_decoder(path, layout=layout), 3, whole=True)
    a, b, c = random_prompts(3, 50, 70, seed=3)
    wanted_a, wanted_b, wanted_c = (reference_logits(path, ids) for ids in (a, b, c))

    # Two prompts in one step: one whole but for its last tokens, one cut in a chunk that ends inside a page.
    got = run.step({}, {0: a[:-4], 1: b[:21]}, pad_t=3)
    assert_close(got[0], wanted_a[-5])
    assert_close(got[1], wanted_b[20])
    # Decode beside the other's second chunk and a new prompt, with padding rows in both parts.
    got = run.step({0: a[-4]}, {1: b[21:40], 2: c[:1]}, pad_b=2, pad_t=1)
    assert_close(got[0], wanted_a[-4])
    assert_close(got[1], wanted_b[39])
    assert_close(got[2], wanted_c[0])
    # A chunk of one token, two decodes.
    got = run.step({2: c[1], 0: a[-3]}, {1: b[40:41]})
    assert_close(got[0], wanted_c[1])
    assert_close(got[1], wanted_a[-3])
    assert_close(got[2], wanted_b[40])
    # Decodes alone.
    got = run.step({0: a[-2], 1: b[41], 2: c[2]}, {}, pad_b=1)
    assert_close(got[0], wanted_a[-2])
    assert_close(got[1], wanted_b[41])
    assert_close(got[2], wanted_c[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_agree_with_transformers(family: str) -> None:
    path = checkpoint(family)
    prompts = random_prompts(10, 2, 40, seed=4)
    said = Sequences(make_decoder(path), 10).greedy(prompts, 32)
    assert {len(tokens) for tokens in said} == {32}
    assert said == likeliest(path, prompts, said)
    few = 60 if family in ("nemotron-h", "apertus") else 100  # else the agreement would mean little
    assert len({token for tokens in said for token in tokens}) > few
    assert len({tuple(tokens) for tokens in said}) == 10


_RANK = """
import json, sys
from pathlib import Path
import torch
from paged_sequences import CPU, Sequences, make_decoder
from tercet.model.parallel import Group
torch.set_num_threads(1)
rank, size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
group = Group.join(rank, size, CPU, rendezvous, timeout_s=60.0)
assert group.min(10 + rank) == 10
paths, steps = json.load(sys.stdin)
answers = []
for path in paths:
    run = Sequences(make_decoder(Path(path), group), 2)
    for decodes, chunks in steps:
        logits = run.step({int(s): t for s, t in decodes.items()}, {int(s): t for s, t in chunks.items()})
        answers.append(logits.tolist())
print(json.dumps(answers))
group.close()
"""


ON_TWO = ["llama-bias-tied", "smollm2", "phi3", "granite", "gemma2", "gemma3", "gemma4", "gemma4-told", "olmo2", "glm4"]
ON_TWO += ["ernie4.5-bias", "exaone4", "hunyuan"]
WITH_EXPERTS = ["mixtral", "gemma4-moe", "qwen2-moe", "qwen3-moe", "glm4-moe", "minimax-m2", "gpt-oss"]
WITH_LATENTS = ["deepseek-v2-groups", "glm4-moe-lite"]
WITH_STATES = ["qwen3-next", "qwen3.5", "qwen3.5-moe", "granite-h", "granite-h-dense", "nemotron-h"]


@pytest.mark.parametrize(
    ("size", "families"),
    [
        (2, [*ON_TWO, *WITH_EXPERTS, *WITH_LATENTS, *WITH_STATES]),
        long(2, ["ernie4.5-moe", "hunyuan-moe", "deepseek-v3", "youtu", "minicpm3", "ministral3", "mistral4"]),
        long(4, ["qwen2", "mistral", "gemma4", "llama-mha-head-dim", "qwen3", "olmo2", "deepseek-v2", "deepseek-v3"]),
    ],
)
def test_ranks_give_the_same_logits(size: int, families: list[str], tmp_path: Path) -> None:
    a, b = random_prompts(2, 30, 40, seed=5)
    steps = [({}, {0: a[:20], 1: b[:7]}), ({0: a[20]}, {1: b[7:25]}), ({0: a[21], 1: b[25]}, {})]
    task = json.dumps([[str(checkpoint(family)) for family in families], steps])
    command = [sys.executable, "-c", _RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(tmp_path / "rendezvous")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(task)
            rank.stdin.close()
        answers = []
        for rank in ranks:
            assert rank.stdout is not None
            answers.append(json.loads(rank.stdout.read()))
            assert rank.wait(60) == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(answer == answers[0] for answer in answers), "ranks must agree to the bit: each samples on its own"
    for index, family in enumerate(families):
        wanted_a, wanted_b = (reference_logits(checkpoint(family), ids) for ids in (a, b))
        got = answers[0][3 * index : 3 * index + 3]
        for step, wanted in enumerate([(wanted_a[19], wanted_b[6]), (wanted_a[20], wanted_b[24])]):
            assert_close(torch.tensor(got[step]), torch.stack(wanted))
        assert_close(torch.tensor(got[2]), torch.stack((wanted_a[21], wanted_b[25])))
