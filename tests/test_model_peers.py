"""The decoder on ranks that reach each other's memory: kernels in the interpreter, logits as transformers has them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from checkpoints import make_checkpoint, random_prompts, reference_model

_RANK = """
import json, sys
from pathlib import Path
import torch
from paged_sequences import CPU, Sequences, make_decoder
from peer_rank import mapped
from tercet.model.parallel import Group
from tercet.model.peers import Limits, Peers
from tercet.triton_kernels.inbox import RowInboxes, WordInboxes
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
model, steps = json.load(sys.stdin)
group = Group.join(rank, size, CPU, str(folder / "rendezvous"), timeout_s=60.0)
decoder = make_decoder(Path(model), group, layout="fused")
row_bytes = 4 * decoder.config.hidden_size
words, rows = (mapped(kind, rank, size, folder, row_bytes) for kind in (WordInboxes, RowInboxes))
group._peers = Peers(words, rows, Limits(row_bytes, 6 * row_bytes))
run = Sequences(decoder, 2)
answers = [
    run.step({int(s): t for s, t in decodes.items()}, {int(s): t for s, t in chunks.items()}).tolist()
    for decodes, chunks in steps
]
assert words.calls_M.tolist()[0] > 0, "one row goes through peer memory word by word"
assert rows.calls_M.tolist()[1] > 0, "two rows with flags"
assert rows.calls_M.tolist()[2] == 0, "and thirteen not"
print(json.dumps(answers))
group.close()
"""


def test_two_ranks(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path, num_hidden_layers=2)
    a, b = random_prompts(2, 14, 14, seed=5)
    # Thirteen rows are more than go through peer memory here; two go another way than one.
    steps = [({}, {0: a[:9], 1: b[:4]}), ({0: a[9], 1: b[4]}, {}), ({1: b[5]}, {})]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), "2", str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps([str(model), steps]))
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
    assert answers[0] == answers[1], "ranks must agree to the bit: each samples on its own"
    with torch.inference_mode():
        wanted_a, wanted_b = (reference_model(model)(torch.tensor([ids])).logits[0] for ids in (a, b))
    for got, wanted in zip(
        answers[0], ([wanted_a[8], wanted_b[3]], [wanted_a[9], wanted_b[4]], [wanted_b[5]]), strict=True
    ):
        torch.testing.assert_close(torch.tensor(got), torch.stack(wanted), rtol=1e-4, atol=1e-3)
