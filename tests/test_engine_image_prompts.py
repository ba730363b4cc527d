"""Prompts with images, from a client's bytes to what a scheduler gets: pure, no process."""

import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from seeing import BREAK, END, IMAGE_TOKEN, PAD, PIXTRALS, VOCAB_SIZE, encoded, picture, seeing_checkpoint
from tercet.engine import image_desk, images
from tercet.engine.config import EngineConfig
from tercet.engine.front_desk import FrontDesk
from tercet.engine.image_rules import load_image_rules
from tercet.engine.live import Live
from tercet.engine.reception import Reception
from tercet.engine.refusal import Refusal
from tercet.engine.rules import make_rules
from tercet.engine.text_codec import load_codec
from tercet.ipc.answers import Failed, PromptIds, Tokenized
from tercet.ipc.content import ImagePart, Part, TextPart
from tercet.ipc.images import IMAGE_IDS
from tercet.ipc.messages import (
    Chat,
    ChatMessage,
    ChatOptions,
    Embed,
    Generate,
    GenerateIds,
    Handling,
    Request,
    SamplingParams,
    Tokenize,
)
from tercet.ipc.process_messages import Limits
from tercet.ipc.step_messages import Started, Submit, Tokens

WIDE, TALL = encoded(picture(84, 56)), encoded(picture(28, 112, seed=1), "JPEG")
"""Of six tokens, and of four."""
EAGLE = {"method": "eagle3", "model": "other", "num_speculative_tokens": 3}


class Desk:
    """A tokenizer process without its sockets."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        codec, self.config = load_codec(folder), EngineConfig(model="tiny", **settings)
        rules = make_rules(codec, Limits(1000, 200, VOCAB_SIZE, "float32", "cpu", 8), self.config)
        self.front = FrontDesk(codec.pieces)
        image_rules = load_image_rules(folder, self.config)
        self.reception = Reception(self.front, codec, rules, self.config, image_rules)

    def admit(self, request: Request) -> Live:
        """As the tokenizer process does, from bytes on."""
        decoded: Any = self.reception.decode([msgspec.msgpack.encode(request)])
        live = self.reception.admit(b"client", decoded)
        if isinstance(live, Failed):
            raise Refusal(live.code, live.message)
        assert isinstance(live, Live), live
        return live

    def submit(self, request: Request) -> Submit:
        live = self.admit(request)
        try:
            return self.reception.submit(live, request, self.reception.prepare(live, request), 0.0)
        except Refusal as refusal:
            self.front.fail(live, refusal.code, str(refusal))
            raise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_checkpoint(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def desk(folder: Path) -> Desk:
    return Desk(folder)


def turn(*parts: str | bytes) -> ChatMessage:
    made: list[Part] = [TextPart(one) if isinstance(one, str) else ImagePart(one) for one in parts]
    return ChatMessage("user", tuple(made))


def chat(*parts: str | bytes, **more: Any) -> Chat:
    return Chat("a", (turn(*parts),), **more)


def ids(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


def text_ids(text: str) -> list[int]:
    from tokenizer_process import byte_tokenizer

    return byte_tokenizer().encode(text).ids


def shape_of(prompt_ids: Sequence[int]) -> list[int]:
    """Tokens of images as the one that clients know."""
    return [IMAGE_TOKEN if token_id >= IMAGE_IDS else token_id for token_id in prompt_ids]


def test_a_conversation_with_images(desk: Desk) -> None:
    submit = desk.submit(chat("see ", WIDE, TALL, " and", TALL))
    prompt_ids = ids(submit.prompt_ids)
    before, between = text_ids("<user>see "), text_ids(" and")
    wanted = [*before, *[IMAGE_TOKEN] * 10, *between, *[IMAGE_TOKEN] * 4, *text_ids("<assistant>")]
    assert shape_of(prompt_ids) == wanted
    first, second, third = submit.images
    assert [(one.first, one.num_tokens, one.height, one.width) for one in submit.images] == [
        (len(before), 6, 56, 84),
        (len(before) + 6, 4, 112, 28),
        (len(before) + 10 + len(between), 4, 112, 28),
    ]
    assert first.pixels == picture(84, 56).tobytes()
    assert second.pixels == third.pixels
    tokens = [prompt_ids[one.first : one.first + one.num_tokens] for one in submit.images]
    assert tokens[1] == tokens[2]
    assert len({*tokens[0], *tokens[1]}) == 10


def test_a_text_that_keeps_the_places_itself(desk: Desk) -> None:
    submit = desk.submit(Generate("a", f"x{PAD}y{PAD}", images=(TALL, WIDE)))
    assert shape_of(ids(submit.prompt_ids)) == [*text_ids("x"), *[IMAGE_TOKEN] * 4, *text_ids("y"), *[IMAGE_TOKEN] * 6]
    assert [image.first for image in submit.images] == [1, 6]


def test_words_between_rows(tmp_path: Path) -> None:
    """They are ordinary ones; whose rows they are behind, others are."""
    desk = Desk(seeing_checkpoint(tmp_path, "Mistral3ForConditionalGeneration", PIXTRALS))
    request = chat("see ", WIDE, TALL, handling=Handling(return_prompt_ids=True))
    submit = desk.submit(request)
    prompt_ids, token = ids(submit.prompt_ids), IMAGE_TOKEN
    wide = [token, token, token, BREAK, token, token, token, END]
    tall = [token, BREAK, token, BREAK, token, BREAK, token, END]
    before = text_ids("<user>see ")
    assert shape_of(prompt_ids) == [*before, *wide, *tall, *text_ids("<assistant>")]
    assert [(one.first, one.num_tokens, one.height, one.width) for one in submit.images] == [
        (len(before), 8, 56, 84),
        (len(before) + 8, 8, 112, 28),
    ]
    assert len({token_id for token_id in prompt_ids if token_id >= IMAGE_IDS}) == 10
    answer = desk.reception.answer(Tokenize("t", request))
    assert isinstance(answer, Tokenized)
    assert ids(answer.token_ids) == shape_of(prompt_ids)
    again = desk.submit(msgspec.structs.replace(request, request_id="b"))
    assert (again.prompt_ids, again.images) == (submit.prompt_ids, submit.images)


def test_texts_are_as_they_were(desk: Desk) -> None:
    parts = desk.submit(chat("one ", "two"))
    whole = desk.submit(msgspec.structs.replace(chat(), request_id="b", messages=(ChatMessage("user", "one two"),)))
    assert (parts.prompt_ids, parts.images) == (whole.prompt_ids, ())
    assert ids(parts.prompt_ids) == text_ids("<user>one two<assistant>")


def test_an_answer_that_goes_on(desk: Desk) -> None:
    request = Chat("a", (turn(WIDE), ChatMessage("assistant", "a cat")), options=ChatOptions(ending="continued"))
    assert shape_of(ids(desk.submit(request).prompt_ids))[-11:] == text_ids("stant>a cat")


def test_clients_hear_of_the_token_that_keeps_the_place(desk: Desk) -> None:
    request = chat("see ", WIDE, handling=Handling(return_prompt_ids=True))
    submit = desk.submit(request)
    started = Tokens(array("q", [1]).tobytes(), array("i", [5]).tobytes(), (), (Started(1, 0, 0.1, 0.1),))
    items, _ = desk.front.accept([started], 1.0)
    (told,) = [item for item in items[b"client"] if isinstance(item, PromptIds)]
    assert ids(told.token_ids) == shape_of(ids(submit.prompt_ids))
    answer = desk.reception.answer(Tokenize("t", request))
    assert isinstance(answer, Tokenized)
    assert answer.token_ids == told.token_ids
    assert desk.front.cancel(b"client", "a", 2.0)[1][0].usage.num_prompt_tokens == len(told.token_ids) // 4


def test_several_answers_and_a_new_scheduler(desk: Desk) -> None:
    """The images go along with what is submitted again."""
    submit = desk.submit(chat(WIDE, params=SamplingParams(n=3, seed=1)))
    assert (len(submit.siblings), len(submit.images)) == (2, 1)
    (asked,) = desk.front.renumber()
    again = asked.submit(2.0, again=True)
    assert (again.prompt_ids, again.images) == (submit.prompt_ids, submit.images)


def test_a_client_that_comes_back(desk: Desk) -> None:
    """Its tokenizer died: the images come once more, and of its answer what it has."""
    received = array("i", text_ids("so")).tobytes()
    submit = desk.submit(chat(WIDE, handling=Handling(received_ids=received)))
    assert (submit.again, submit.generated_ids, len(submit.images)) == (True, received, 1)


REFUSED = [
    (chat(*[WIDE] * 17), "the prompt brings 17 images; want at most 16 .--limit-mm-per-prompt"),
    (chat(WIDE, b"GIF89a"), "the prompt brings image 2 of 2, which cannot be used: 6 bytes that are no image"),
    (chat(WIDE, f"not {PAD} mine"), "the prompt has places for 2 images .token 257., and 1 came"),
    (chat(f"not {PAD} mine"), "the prompt has places for 1 images .token 257., and 0 came"),
    (Generate("a", "x", images=(WIDE,)), "places for 0 images .* 1 came"),
    (GenerateIds("a", array("i", [5, IMAGE_TOKEN]).tobytes()), "places for 1 images .* 0 came"),
    (GenerateIds("a", array("i", [5, IMAGE_IDS + 3]).tobytes()), "token id 1073741827; want ids from 0 to 259"),
    (Embed("a", PAD), "places for 1 images .* 0 came"),
    (
        chat(*[encoded(picture(112, 112))] * 12, "x" * 9),
        "the prompt has 218 tokens, 192 of them of images, and .* context length is 200",
    ),
    (chat(WIDE, params=SamplingParams(prompt_logprobs=0)), "prompt_logprobs is 0 beside images"),
    (chat(WIDE, params=SamplingParams(truncate_prompt_tokens=-1)), "truncate_prompt_tokens is -1 beside images"),
    (chat(WIDE, params=SamplingParams(max_tokens=180)), "max_tokens.* 180"),
    (
        Chat("a", (ChatMessage("assistant", (ImagePart(WIDE),)),), options=ChatOptions(ending="continued")),
        "messages ends with an image",
    ),
]


@pytest.mark.parametrize(("request_", "words"), REFUSED)
def test_what_is_refused(desk: Desk, request_: Request, words: str) -> None:
    with pytest.raises(Refusal, match=words):
        desk.submit(request_)
    assert desk.front.num_live == 0
    desk.submit(chat(WIDE))


def test_what_is_too_long_is_not_decoded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(image_desk, "read_image")
    with pytest.raises(Refusal, match="192 of them of images"):
        desk.submit(chat(*[encoded(picture(112, 112))] * 12, "x" * 9))
    assert isinstance(desk.reception.answer(Tokenize("t", chat(WIDE))), Tokenized)


def test_engines_without_images(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, place, words in (
        ({"limit_mm_per_prompt": {"image": 0}}, folder, "--limit-mm-per-prompt"),
        ({"speculative_config": EAGLE}, folder, "--speculative-config"),
        ({}, seeing_checkpoint(tmp_path, "LlamaForCausalLM"), "images are not served with this model"),
    ):
        desk = Desk(place, **settings)
        with pytest.raises(Refusal, match=f"brings 1 image; want text alone: .*{words}"):
            desk.submit(chat(WIDE))
        assert desk.submit(chat(f"as ever {PAD}")).images == ()
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    desk = Desk(folder)
    with pytest.raises(Refusal, match=r"pip install 'tercet\[images\]'"):
        desk.submit(chat(WIDE))
    assert desk.submit(chat("as ever")).images == ()


def test_images_are_prepared_aside(desk: Desk) -> None:
    assert desk.reception.is_quick(chat("x"))
    for request in (chat(WIDE), Generate("a", PAD, images=(WIDE,)), Tokenize("t", chat(WIDE))):
        assert not desk.reception.is_quick(request)


def test_what_was_decoded_is_kept_under_its_salt(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []

    def counted(file: bytes, rules: Any) -> images.Pixels:
        read.append(file)
        return images.read_image(file, rules)

    monkeypatch.setattr(image_desk, "read_image", counted)
    for number, salt in enumerate(("", "", "mine", "mine", "")):
        request = msgspec.structs.replace(chat(WIDE, TALL), request_id=str(number), cache_salt=salt)
        desk.submit(request)
    assert sorted(read) == sorted([WIDE, TALL] * 2)


def test_images_of_a_prompt_are_decoded_beside_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, and the first that is wrong is named."""
    together, read = threading.Barrier(2, timeout=30), list[bytes]()

    def waiting(file: bytes, rules: Any) -> images.Pixels:
        read.append(file)
        together.wait()
        return images.read_image(file, rules)

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    desk = Desk(folder)
    monkeypatch.setattr(image_desk, "read_image", waiting)
    desk.submit(chat(WIDE, TALL, WIDE, TALL, TALL))
    assert sorted(read) == sorted([WIDE, TALL])
    halves = encoded(picture(84, 56, seed=2))[:900], encoded(picture(84, 56, seed=3))[:900]
    with pytest.raises(Refusal, match="image 2 of 4, which cannot be used: it cannot be decoded"):
        desk.submit(msgspec.structs.replace(chat(WIDE, *halves, TALL), request_id="b"))


def test_pixels_of_live_requests_are_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    outstanding = desk.front.outstanding
    monkeypatch.setattr(outstanding, "_most_image_bytes", 20_000)
    desk.submit(chat(WIDE))
    with pytest.raises(Refusal, match="images of 14112 bytes, decoded, wait") as refused:
        desk.submit(msgspec.structs.replace(chat(WIDE), request_id="b"))
    assert refused.value.code == "overloaded"
    desk.front.cancel(b"client", "a", 1.0)
    desk.submit(msgspec.structs.replace(chat(WIDE), request_id="b"))
