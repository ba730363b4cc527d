"""The file of one GPU's tuned configurations, as the tuners write it and `triton_kernels/tuning.py` reads it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tercet.triton_kernels.matmul_config import MatmulConfig

Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""For each line of the table, and each bucket of rows, a configuration's fields."""


def write_table(rows: Rows, table: Path) -> None:
    """Write the whole table, fields that have their default values left out."""
    defaults = asdict(MatmulConfig("", -1, -1, -1, -1))
    lines = (
        f" {json.dumps(key)}: {{\n"
        + ",\n".join(
            f"  {json.dumps(m)}: {json.dumps({k: v for k, v in config.items() if defaults[k] != v})}"
            for m, config in rows[key].items()
        )
        + "\n }"
        for key in sorted(rows)
    )
    table.write_text('{"matmul": {\n' + ",\n".join(lines) + "\n}}\n")


def merge_into_table(rows: Rows, table: Path) -> None:
    """Put these buckets into a table that is there, or begin one."""
    merged = json.loads(table.read_text())["matmul"] if table.exists() else {}
    for key, buckets in rows.items():
        both = {**merged.get(key, {}), **buckets}
        merged[key] = {m: both[m] for m in sorted(both, key=int)}
    write_table(merged, table)
