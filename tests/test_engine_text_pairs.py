"""Two texts as one prompt, as tokenizer.json says of pairs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tercet.engine.text_codec import TextRefused, load_codec
from tokenizer_process import byte_checkpoint

A, B = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
BEGIN, END = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ([BEGIN, A, BEGIN, B], ""),
        ([A, END, B], "writes '</s>', which is not among its special_tokens"),
        ([A], "writes A of two"),
        ([], "writes nothing of two"),
    ],
)
def test_what_the_post_processor_writes(tmp_path: Path, pair: list[Any], words: str) -> None:
    """What the library would panic over, or leave out, is refused where it is asked for: single texts are served."""
    folder = byte_checkpoint(tmp_path)
    begin = {"id": "<s>", "ids": [256], "tokens": ["<s>"]}
    step = {"type": "TemplateProcessing", "single": [BEGIN, A], "pair": pair, "special_tokens": {"<s>": begin}}
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": step}))
    codec = load_codec(folder)
    single = codec.encode("hi").tolist()
    assert single[0] == 256
    if words:
        with pytest.raises(TextRefused, match=f"the tokenizer takes no pair of texts: its post-processor {words}"):
            codec.encode_pair("hi", "ho")
        return
    for second in ("ho", "ho" * 5000):
        assert codec.encode_pair("hi", second).tolist() == single + codec.encode(second).tolist()


def test_without_a_post_processor(tmp_path: Path) -> None:
    codec = load_codec(byte_checkpoint(tmp_path))
    assert codec.encode_pair("hi", "ho") == codec.encode("hiho")
