"""PROCESS of test_model_adapters.py: one of several ranks on the CPU, which prints what an adapter says to a prompt."""

import json
import sys
from pathlib import Path

import torch

from paged_sequences import CPU, Sequences, make_decoder
from tercet.model.parallel import Group

if __name__ == "__main__":
    rank, size, meeting, path, folder, prompt = sys.argv[1:]
    torch.set_num_threads(1)
    group = Group.join(int(rank), int(size), CPU, meeting, 60)
    decoder = make_decoder(Path(path), group, adapters=[Path(folder)])
    print(json.dumps(Sequences(decoder, 1, adapters=[0]).greedy([json.loads(prompt)], 6)))
