"""What the tuner inside a step tries and writes; the measuring needs a GPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from captured_step import share_of_rank
from matmul_candidates import near_candidates
from matmul_products import PRODUCTS
from shapes import SHAPES
from step_table import choices
from tercet.model.config_json import parse_config
from tercet.triton_kernels import tuning
from tercet.triton_kernels.matmul_launch import can_divide
from tercet.triton_kernels.tuning import MatmulConfig, load_table
from tuned_table import merge_into_table, write_table

TABLES = sorted(Path(tuning.__file__).parent.glob("tuned/*.json"))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("name", "prefix", "size"), [("0.6b", "0.6b.", 1), ("8b", "8b.", 1), ("8b", "8b_tp2.", 2)])
def test_products_of_a_rank(name: str, prefix: str, size: int, alone: bool) -> None:
    found = choices(parse_config(SHAPES[f"qwen3-{name}"]), size, alone=alone)
    listed = [one for one in PRODUCTS if one.name.startswith(prefix) and not one.normed]
    assert {(one.product.op, one.product.N, one.product.K) for one in found} == {
        (one.op, one.N, one.K) for one in listed
    }
    assert {one.asked != one.line for one in found if one.divided} == {size > 1 and alone}


def test_the_share_of_a_rank_is_a_model() -> None:
    share = share_of_rank(parse_config(SHAPES["qwen3-32b"]), 4, 3)
    assert (share.num_heads, share.num_kv_heads, share.intermediate_size, share.vocab_size) == (16, 2, 6400, 37984)
    assert (share.hidden_size, share.num_layers, share.layer_windows) == (5120, 3, (0, 0, 0))
    with pytest.raises(ValueError, match="--tensor-parallel-size is 3"):
        share_of_rank(parse_config(SHAPES["qwen3-32b"]), 3, 3)


@pytest.mark.parametrize("num_rows", [1, 8, 64, 256, 8192])
def test_candidates_fit_the_product(num_rows: int) -> None:
    table = load_table("NVIDIA H200")
    for choice in choices(parse_config(SHAPES["qwen3-32b"]), 4, alone=False):
        found = near_candidates(choice.product, num_rows, table, divided=choice.divided)
        assert len(set(found)) == len(found) > 5
        assert all(one.parts == 1 or can_divide(one, choice.product.K) for one in found)
        assert all((one.kernel == "vector") <= (num_rows == 1) for one in found)
        asks = {one for one in found if one.prefetch}
        assert bool(asks) == (8 <= num_rows <= 256)
        assert {replace(one, prefetch=0) for one in asks} <= set(found)


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_a_table_is_written_as_it_was(table: Path, tmp_path: Path) -> None:
    write_table(json.loads(table.read_text())["matmul"], tmp_path / "same.json")
    assert (tmp_path / "same.json").read_text() == table.read_text()


def test_a_bucket_is_merged_into_its_line(tmp_path: Path) -> None:
    table = tmp_path / "card.json"
    one, other = ({"kernel": kernel, "block_m": 8, "block_n": 16, "block_k": 64, "num_warps": 1} for kernel in "ab")
    merge_into_table({"line": {"64": one, "8": one}}, table)
    merge_into_table({"line": {"16": other, "8": other}, "next": {"1": one}}, table)
    lines = json.loads(table.read_text())["matmul"]
    assert list(lines["line"]) == ["8", "16", "64"]
    assert lines == {"line": {"8": other, "16": other, "64": one}, "next": {"1": one}}
    assert MatmulConfig(**lines["line"]["64"]).num_stages == 3
