"""What is written around images in a prompt, of a model that wants that: from a client's bytes on."""

from pathlib import Path

import pytest

from seeing import BREAK, END, GEMMAS, IMAGE_TOKEN, PAD, encoded, picture, seeing_checkpoint
from tercet.engine.refusal import Refusal
from tercet.ipc.answers import Tokenized
from tercet.ipc.messages import Generate, Tokenize
from test_engine_image_prompts import TALL, WIDE, Desk, chat, ids, shape_of, text_ids


def test_words_around_images(tmp_path: Path) -> None:
    """Written where images come, and become tokens with the text around."""
    desk = Desk(seeing_checkpoint(tmp_path, "Gemma3ForConditionalGeneration", {}))
    around = [*text_ids("\n\n"), BREAK, *[IMAGE_TOKEN] * 4, END, *text_ids("\n\n")]
    begin, _ = GEMMAS
    wanted = [*text_ids("<user>see\n"), *around, *around, *text_ids(" and<assistant>")]
    request = chat("see\n", WIDE, TALL, " and")
    submit = desk.submit(request)
    assert shape_of(ids(submit.prompt_ids)) == wanted
    first = len(text_ids("<user>see\n")) + 3
    assert [(one.first, one.num_tokens, one.height, one.width) for one in submit.images] == [
        (first, 4, 56, 56),
        (first + 10, 4, 56, 56),
    ]
    answer = desk.reception.answer(Tokenize("t", request))
    assert isinstance(answer, Tokenized)
    assert ids(answer.token_ids) == wanted
    submit = desk.submit(Generate("b", f"x{begin}", images=(TALL,)))
    assert shape_of(ids(submit.prompt_ids)) == [*text_ids("x"), *around]
    alone = desk.submit(Generate("d", f"x{begin}"))
    assert ids(alone.prompt_ids) == [*text_ids("x"), BREAK]
    with pytest.raises(Refusal, match=r"has places for 2 images \(token 257\), and 1 came"):
        desk.submit(Generate("e", f"x{begin}{begin}", images=(TALL,)))


def test_words_around_images_of_tiles(tmp_path: Path) -> None:
    """What keeps the place is what an image's tokens are; of an image of several tiles there are more."""
    desk = Desk(seeing_checkpoint(tmp_path, "InternVLForConditionalGeneration", {"max_patches": 4}))
    small, tall = [BREAK, *[IMAGE_TOKEN] * 4, END], [BREAK, *[IMAGE_TOKEN] * 20, END]
    request = chat("see ", encoded(picture(40, 40)), TALL, " and")
    submit = desk.submit(request)
    before = text_ids("<user>see ")
    wanted = [*before, *small, *tall, *text_ids(" and<assistant>")]
    assert shape_of(ids(submit.prompt_ids)) == wanted
    first = len(before) + 1
    assert [(one.first, one.num_tokens, one.height, one.width) for one in submit.images] == [
        (first, 4, 56, 56),
        (first + 6, 20, 280, 56),
    ]
    answer = desk.reception.answer(Tokenize("t", request))
    assert isinstance(answer, Tokenized)
    assert ids(answer.token_ids) == wanted
    assert ids(desk.submit(Generate("b", f"x{PAD}", images=(TALL,))).prompt_ids)[1] == BREAK
    with pytest.raises(Refusal, match=r"has places for 2 images \(token 257\), and 1 came"):
        desk.submit(Generate("c", f"x{PAD}{PAD}", images=(TALL,)))
