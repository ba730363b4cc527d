"""How much memory there is, as the system says it and as a container has it."""

from pathlib import Path

import pytest

from tercet.engine import free_memory as module
from tercet.engine.config import EngineConfig
from tercet.engine.errors import StartupFailed
from tercet.engine.free_memory import check_host_memory, free_memory

GIB = 2**30
MEMINFO = "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:   16777216 kB\n"
NEW = {"memory.max": str(8 * GIB), "memory.current": str(5 * GIB), "memory.stat": f"anon 7\ninactive_file {GIB}\n"}
OLD = {
    "memory.limit_in_bytes": str(4 * GIB),
    "memory.usage_in_bytes": str(3 * GIB),
    "memory.stat": f"inactive_file 9\ntotal_inactive_file {GIB // 2}\n",
}


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("", {}, 16 * GIB),
        ("0::/a/b\n", {}, 16 * GIB),
        ("0::/a/b\n", {"a/b": NEW}, 4 * GIB),
        ("0::/a/b\n", {"a": NEW, "a/b": {**NEW, "memory.max": "max"}}, 4 * GIB),
        ("0::/a/b\n", {".": {**NEW, "memory.max": str(99 * GIB)}}, 16 * GIB),
        ("0::/a/b\n", {"a": {**NEW, "memory.max": str(GIB)}}, 0),
        ("5:cpu,cpuacct:/a\n4:memory:/a\n", {"memory/a": OLD}, 3 * GIB // 2),
        ("4:memory:/a\n", {"memory": OLD, "a": NEW}, 3 * GIB // 2),
    ],
)
def test_free(groups: str, files: dict[str, dict[str, str]], free: int, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "cgroup").write_text(groups)
    for folder, contents in files.items():
        (tmp_path / "mount" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (tmp_path / "mount" / folder / name).write_text(text)
    assert free_memory(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "mount") == free


def test_nobody_says(tmp_path: Path) -> None:
    nothing = tmp_path / "is not there"
    assert free_memory(nothing, nothing, nothing) is None


def test_this_machine() -> None:
    free = free_memory()
    assert free is not None
    assert 0 < free < 2**50


def test_no_more_than_nine_tenths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_memory", lambda: 100 * GIB)
    for options in ({}, {"kv_offloading_size": 90 * GIB}, {"kv_offloading_size": 45 * GIB, "data_parallel_size": 2}):
        check_host_memory(EngineConfig(model="m", **options))  # type: ignore[arg-type]
    with pytest.raises(StartupFailed, match=r"is 91\.0 GiB, and 100\.0 GiB .* are free; want at most 90\.0 GiB"):
        check_host_memory(EngineConfig(model="m", kv_offloading_size=91 * GIB))
    with pytest.raises(StartupFailed, match=r"for each of 2 replicas, and 100\.0 GiB .* at most 45\.0 GiB"):
        check_host_memory(EngineConfig(model="m", kv_offloading_size=50 * GIB, data_parallel_size=2))
    check_host_memory(EngineConfig(model="m", kv_offloading_size=500 * GIB, load_format="null"))
    monkeypatch.setattr(module, "free_memory", lambda: None)
    check_host_memory(EngineConfig(model="m", kv_offloading_size=500 * GIB))
