"""The decoder on ranks that reach each other's memory: kernels in the interpreter, logits as transformers has them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from checkpoints import make_checkpoint, random_prompts, reference_model
from tercet.model.peers import Limits, Peers
from tercet.triton_kernels.inbox import RowInboxes, WordInboxes

_RANK = """
import json, sys
from pathlib import Path
import torch
from paged_sequences import CPU, Sequences, make_decoder
from peer_rank import mapped, mapped_exchange, wait_asleep
from quick_interpreter import quicken
import tercet.model.exchange
from tercet.triton_kernels import matmul_parts
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.model.parallel import Group
from tercet.model.peers import Limits, Peers
from tercet.triton_kernels.inbox import RowInboxes, WordInboxes
quicken()
wait_asleep()
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
model, steps = json.load(sys.stdin)
group = Group.join(rank, size, CPU, str(folder / "rendezvous"), timeout_s=60.0)
decoder = make_decoder(Path(model), group, layout="fused")
row_bytes = 4 * decoder.config.hidden_size
words, rows = (mapped(kind, rank, size, folder, row_bytes) for kind in (WordInboxes, RowInboxes))
group._peers = Peers(words, rows, Limits(row_bytes, 6 * row_bytes))
tercet.model.exchange._FEWEST_TOKENS, tercet.model.exchange._HALF_MULTIPLE = 13, 4
group._exchange = mapped_exchange(rank, size, folder, 12, decoder.config)
tuned, divided = matmul_parts.choose_matmul, []
def in_parts(whole, M, N, K, *how):
    divided.append((whole, M < 3 and K % 32 == 0))
    return MatmulConfig("skinny", 16, 16, 16, 1, parts=2) if M < 3 else tuned(whole, M, N, K, *how)
matmul_parts.choose_matmul = in_parts
run = Sequences(decoder, 2, whole=True)
answers = [
    run.step({int(s): t for s, t in decodes.items()}, {int(s): t for s, t in chunks.items()}, pad_t=pad).tolist()
    for decodes, chunks, pad in steps
]
assert words.calls_M.tolist()[0] > 0, "one row goes through peer memory word by word"
assert rows.calls_M.tolist()[1] > 0, "two rows with flags"
assert rows.calls_M.tolist()[2] == 0, "and nine not"
assert group._exchange._arrivals.step_1.item() == 3, "many rows are exchanged as whole messages"
assert ("matmul", True) in divided, "few rows are multiplied in parts"
print(json.dumps(answers))
group.close()
"""


def test_two_ranks(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path, num_hidden_layers=2)
    a, b = random_prompts(2, 60, 60, seed=5)
    # From 13 rows on whole messages are exchanged here, in halves of which one may be padding. Up to six go through
    # inboxes, one row another way than two; nine go by collectives.
    steps = [
        ({}, {0: a[:9], 1: b[:4]}, 3),
        ({0: a[9], 1: b[4]}, {}, 0),
        ({1: b[5]}, {}, 0),
        ({}, {0: a[10:18]}, 1),
        ({1: b[6]}, {0: a[18:22]}, 15),
        ({}, {1: b[7:25], 0: a[22:24]}, 0),
    ]
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
    wanted_steps = (
        [wanted_a[8], wanted_b[3]], [wanted_a[9], wanted_b[4]], [wanted_b[5]], [wanted_a[17]],
        [wanted_b[6], wanted_a[21]], [wanted_b[24], wanted_a[23]],
    )  # fmt: skip
    for got, wanted in zip(answers[0], wanted_steps, strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.stack(wanted), rtol=1e-4, atol=1e-3)


def test_which_sums_go_which_way() -> None:
    calls, bytes_a_row = torch.zeros(64, dtype=torch.int32), 256
    words, rows = (
        kind(0, (0, 0), calls[:room], bytes_a_row, None) for kind, room in ((WordInboxes, 16), (RowInboxes, 64))
    )
    peers = Peers(words, rows, Limits(4 * bytes_a_row, 64 * bytes_a_row))

    def way(num_rows: int, row_size: int = 64, dtype: torch.dtype = torch.float32) -> object:
        return peers.inboxes_for(torch.empty(num_rows, row_size, dtype=dtype, device="meta"))

    assert [way(n) for n in (1, 4, 5, 64, 65)] == [words, words, rows, rows, None]
    assert [way(n, 128, torch.float16) for n in (4, 5)] == [words, rows]
    assert [way(n, 2, torch.int32) for n in (16, 17)] == [words, rows], "as many short rows as there are places"
    assert way(1, 65) is None, "no row is longer than a place"
    assert peers.inboxes_for(torch.empty(64, device="meta")) is None
