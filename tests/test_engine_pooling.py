"""How a checkpoint makes one vector of a text: the last token's is supported, others are refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from checkpoints import checkpoint
from converted import convert
from tercet.engine.pooling import Pooling, read_pooling
from tercet.engine.text_codec import load_codec

LAST = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
PARTS = ("models.Transformer", "models.Pooling")


def write(folder: Path, config: Any, *kinds: str, path: str = "1_Pooling") -> Path:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if kinds:
        modules = [{"idx": index, "type": f"sentence_transformers.{kind}"} for index, kind in enumerate(kinds)]
        for module in modules[1:2]:
            module["path"] = path
        (folder / "modules.json").write_text(json.dumps(modules))
    return folder


@pytest.mark.parametrize("config", [LAST, {"pooling_mode": "lasttoken"}, {"pooling_mode": ["lasttoken"]}])
@pytest.mark.parametrize(
    ("kinds", "normalized"), [((), True), (PARTS, False), ((*PARTS, "models.Normalize"), True)]
)  # fmt: skip
def test_the_last_token_s(config: Any, kinds: tuple[str, ...], normalized: bool, tmp_path: Path) -> None:
    assert read_pooling(write(tmp_path, config, *kinds)) == Pooling(normalized)


def test_nothing_is_said(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling()
    assert load_codec(convert(checkpoint("qwen3"), tmp_path / "model.gguf")).pooling == Pooling()


@pytest.mark.parametrize(
    ("config", "kinds", "words"),
    [
        ({"pooling_mode_mean_tokens": True}, (), r"1_Pooling/config\.json: the pooling mode is mean; supported: lastt"),
        ({"pooling_mode_lasttoken": True}, (), r"the pooling mode is mean and lasttoken"),  # where it is silent: mean
        ({"pooling_mode": "cls"}, PARTS, r"the pooling mode is cls"),
        ({**LAST, "pooling_mode_lasttoken": False}, PARTS, r"the pooling mode is none"),
        ([], PARTS, r"1_Pooling/config\.json holds a list; want an object"),
        ("{", PARTS, r"1_Pooling/config\.json cannot be read as JSON"),
        (LAST, (*PARTS, "models.Dense"), r"modules\.json: modules are Transformer, Pooling, Dense; supported"),
        (LAST, PARTS[:1], r"modules are Transformer; supported"),
    ],
)
def test_refused(config: Any, kinds: tuple[str, ...], words: str, tmp_path: Path) -> None:
    assert re.search(words, str(read_pooling(write(tmp_path, config, *kinds)).refusal))


def test_only_the_folder_s_own_files(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path, LAST)
    folder = write(tmp_path / "model", LAST, *PARTS, path="../1_Pooling")
    assert "path of Pooling is '../1_Pooling'; want a folder beside it" in str(read_pooling(folder).refusal)


@pytest.mark.parametrize(("kind", "refusal"), [(3, None), (1, "qwen3.pooling_type is 1 (mean); supported: 3")])
def test_gguf_files(kind: int, refusal: str | None, tmp_path: Path) -> None:
    file = convert(checkpoint("qwen3"), tmp_path / "model.gguf", settings={"pooling_type": kind})
    said = load_codec(file).pooling.refusal
    assert said == refusal if refusal is None else refusal in str(said)
