"""Other weights that have no place where there are some: refused, if it can be known before any is touched."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from tercet.model.load import load_decoder, load_into, open_for
from tercet.model.other_weights import Rank, exchange_weights
from tercet.model.parallel import Group
from tercet.model.weights import load_weights
from test_model_other_weights import (
    CPU,
    FP8,
    SIZES,
    as_it_is,
    bits,
    both,
    check_same,
    in_way,
    of_family,
    opened_as_stored,
    with_both,
)


def test_a_head_that_is_the_embedding_in_one_of_them(tmp_path: Path) -> None:
    """Where there is place for one of the two, only one can come. On the CPU each has a place of its own."""
    tied = make_checkpoint("qwen3", tmp_path / "tied")
    apart = with_both(tmp_path / "apart", 1, equal=False)
    for dtype in ("float16", "float32"):
        opened = partial(open_for, device=CPU, dtype=dtype)
        decoder = load_decoder(opened(apart), Group.single(CPU))
        load_into(decoder, opened(tied, like=apart))
        ends = decoder.weights.embedding_VD, decoder.weights.lm_head_VD
        assert torch.equal(*map(bits, ends))
        decoder = load_decoder(opened(tied), Group.single(CPU))
        if dtype == "float16":
            with pytest.raises(ValueError, match="apart: its lm_head is not its embedding"):
                load_into(decoder, opened(apart, like=tied))
        else:
            load_into(decoder, opened(apart, like=tied))
            check_same(decoder, load_decoder(opened(apart, like=tied), Group.single(CPU)))


def test_what_is_kept_otherwise_is_not_begun(tmp_path: Path) -> None:
    plain, stored = (
        of_family("qwen3", **SIZES)(tmp_path / "plain", 0),
        in_way("qwen3", FP8, **SIZES)(tmp_path / "fp8", 1),
    )
    where: dict[str, Any] = {"rank": 0, "size": 1, "dtype": torch.bfloat16, "device": CPU}
    for first, other in ((plain, stored), (stored, plain)):
        config, tensors, kept = opened_as_stored(first, "")
        got, wanted = (load_weights(tensors, config, **where, kept=kept) for _ in range(2))
        config, tensors, kept = opened_as_stored(other, "")
        with pytest.raises(ValueError, match="some of its weights are kept otherwise than those there are"):
            exchange_weights(got, tensors, config, Rank(**where, kept=kept), as_it_is)
        check_same(got, wanted)


def test_what_has_no_head_is_not_begun(tmp_path: Path) -> None:
    first, other = both(of_family("llama"), tmp_path)
    decoder = load_decoder(open_for(first, CPU), Group.single(CPU))
    tensors = load_file(other / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="its files have a head, or none, otherwise than the model's first"):
        load_into(decoder, open_for(other, CPU, like=first))
    check_same(decoder, load_decoder(open_for(first, CPU), Group.single(CPU)))


def test_files_that_shrink_meanwhile(tmp_path: Path) -> None:
    first, other = both(of_family("llama"), tmp_path)
    decoder = load_decoder(open_for(first, CPU), Group.single(CPU))
    opened = open_for(other, CPU, like=first)
    os.truncate(other / "model.safetensors", 50_000)
    with pytest.raises(ValueError, match=r"model.safetensors is shorter than it was when it was opened"):
        load_into(decoder, opened)


def test_another_type_in_config_json_does_not_matter(tmp_path: Path) -> None:
    first, other = both(of_family("llama"), tmp_path)
    saved = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**saved, "dtype": "bfloat16"}))
    decoder = load_decoder(open_for(first, CPU), Group.single(CPU))
    load_into(decoder, open_for(other, CPU, like=first))
    check_same(decoder, load_decoder(open_for(other, CPU, like=first), Group.single(CPU)))
