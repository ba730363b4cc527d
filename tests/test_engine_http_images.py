"""Images by HTTP, in the words of OpenAI's and Anthropic's own clients: from the request to what a scheduler gets.

Tokenizer and HTTP door are real processes; the test plays scheduler and model. What is made of pixels is in
test_engine_images.py, of prompts in test_engine_image_prompts.py.
"""

import asyncio
import base64
import threading
from array import array
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from http_process import http_process
from seeing import IMAGE_TOKEN, VOCAB_SIZE, encoded, picture, seeing_checkpoint
from tercet.ipc.images import IMAGE_IDS
from tercet.ipc.step_messages import Ended, Submit
from tokenizer_process import EOS, USAGE, TokenizerProcess, byte_tokenizer, tokenizer_process

PICTURE = picture(84, 56)
FILE = encoded(PICTURE)
"""Of six tokens."""
DATA = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{DATA}"
FOUND = {"/a.png": FILE, "/big.png": bytes(51 * 2**20)}
LED = {"/there": "/a.png", "/round": "/round", "/away": "http://other.example/a.png", "/slow": "/slow"}


class Pages(BaseHTTPRequestHandler):
    """What other hosts have."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, _, chunked = self.path.partition("?")
        if path in LED:
            self.send_response(302)
            self.send_header("Location", LED[path])
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif path not in FOUND:
            self.send_error(404)
        elif chunked:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for some in (FOUND[path][:100], FOUND[path][100:], b""):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(some), some))
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(FOUND[path])))
            self.end_headers()
            self.wfile.write(FOUND[path])

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


@pytest.fixture(scope="module")
def pages() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which images may be named, with a link out of it."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "a b.png").write_bytes(FILE)
    outside = tmp_path_factory.mktemp("elsewhere") / "c.png"
    outside.write_bytes(FILE)
    (folder / "out.png").symlink_to(outside)
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    folder = seeing_checkpoint(tmp_path_factory.mktemp("seeing"))
    with tokenizer_process(folder, vocab_size=VOCAB_SIZE) as process:
        yield process


@pytest.fixture(scope="module")
def url(engine: TokenizerProcess, pictures: Path) -> Iterator[str]:
    allowed = {"allowed_media_domains": ("127.0.0.1",), "allowed_local_media_path": str(pictures)}
    with http_process(engine, **allowed) as url:
        yield url


@pytest.fixture
async def clients(url: str) -> AsyncIterator[tuple[AsyncOpenAI, AsyncAnthropic]]:
    settings: Any = {"api_key": "none", "max_retries": 0, "timeout": 20.0}
    async with AsyncOpenAI(base_url=f"{url}/v1", **settings) as one, AsyncAnthropic(base_url=url, **settings) as other:
        yield one, other


async def submitted(engine: TokenizerProcess, asking: Any) -> Submit:
    """What is asked of the scheduler, which answers with a letter."""
    task = asyncio.ensure_future(asking)
    submit = await asyncio.to_thread(engine.next_submit)
    engine.sample(submit.number, "y</s>", Ended(submit.number, "stop", EOS, USAGE))
    await task
    return submit


def told(submit: Submit) -> str:
    """The prompt, with a sign for each token of an image."""
    ids = array("i", submit.prompt_ids)
    text = byte_tokenizer().decode([ord("~") - 33 if token_id >= IMAGE_IDS else token_id for token_id in ids])
    assert [image.pixels for image in submit.images] == [PICTURE.tobytes()] * len(submit.images)
    return text


def turn(*parts: Any, role: str = "user") -> Any:
    return {"role": role, "content": [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]}


def named(url: str, **more: Any) -> Any:
    return {"type": "image_url", "image_url": {"url": url, **more}}


async def test_chat_completions(engine: TokenizerProcess, clients: Any) -> None:
    ask, calls = clients[0].chat.completions.create, {"tool_calls": [CALL]}
    messages = [turn("see ", named(URL, detail="auto"), "?"), {"role": "assistant", "content": "", **calls}]
    messages.append({**turn(named(URL), role="tool"), "tool_call_id": "abc"})
    submit = await submitted(engine, ask(model="tiny", messages=messages))
    assert told(submit) == "<user>see ~~~~~~?<assistant><tool>~~~~~~<assistant>"
    assert array("i", submit.prompt_ids)[10:16] == array("i", submit.prompt_ids)[34:40]


CALL = {"id": "abc", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def test_responses(engine: TokenizerProcess, clients: Any) -> None:
    image = {"type": "input_image", "image_url": URL, "detail": "auto"}
    asked: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "see "}, image]},
        {"type": "function_call", "call_id": "abc", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "abc", "output": [image]},
    ]
    submit = await submitted(engine, clients[0].responses.create(model="tiny", input=asked))
    assert told(submit) == "<user>see ~~~~~~<assistant><tool>~~~~~~<assistant>"


async def test_messages(engine: TokenizerProcess, clients: Any, pages: str) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    linked = {"type": "image", "source": {"type": "url", "url": f"{pages}/a.png"}}
    result = {"type": "tool_result", "tool_use_id": "abc", "is_error": True, "content": [linked]}
    used = {"type": "tool_use", "id": "abc", "name": "f", "input": {}}
    asked: Any = {
        "model": "tiny",
        "messages": [turn("a", "b", image, "c"), turn(used, role="assistant"), turn(image, result, "d")],
    }
    submit = await submitted(engine, clients[1].messages.create(**asked, max_tokens=5))
    wanted = "<user>a\nb~~~~~~c<assistant><tool>Error: ~~~~~~<user>~~~~~~d<assistant>"
    assert told(submit) == wanted
    counted = await clients[1].messages.count_tokens(**asked)
    assert counted.input_tokens == len(submit.prompt_ids) // 4


async def test_what_is_told_of_the_prompt(engine: TokenizerProcess, clients: Any, url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        body = {"messages": [turn("x", named(URL))]}
        tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
        assert tokens.count(IMAGE_TOKEN) == 6
        assert max(tokens) < VOCAB_SIZE
        answer = (await http.post("/v1/completions", json={"prompt": [[*tokens]]})).json()
    assert "places for 6 images (token 257), and 0 came" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/a.png", "/a.png?chunked", "/there"])
async def test_images_of_other_hosts(engine: TokenizerProcess, clients: Any, pages: str, path: str) -> None:
    asking = clients[0].chat.completions.create(model="tiny", messages=[turn(named(pages + path))])
    assert told(await submitted(engine, asking)) == "<user>~~~~~~<assistant>"


async def test_images_of_a_folder(engine: TokenizerProcess, clients: Any, pictures: Path) -> None:
    file = (pictures / "a b.png").as_uri()
    asking = clients[0].chat.completions.create(model="tiny", messages=[turn(named(file))])
    assert told(await submitted(engine, asking)) == "<user>~~~~~~<assistant>"


REFUSED = [
    ("data:,", "begins 'data:'; want data:image/png;base64"),
    ("data:image/png,x", "want data:image/png;base64"),
    ("data:image/png;base64,*", "cannot be decoded: .*; want base64"),
    ("gopher://x", "is 'gopher://x'; want a URL of data:, http:, https: or file:"),
    ("http://other.example/a.png", "leads to 'other.example'; want a data: URL, or a host of --allowed-media-domains"),
    ("http://127.0.0.1@other.example/a.png", "has a name or a password"),
    ("http://127.0.0.1:99999/", "is no URL"),
    ("http://127.0.0.1:1/a.png", "cannot be fetched"),
    ("http://127.0.0.1/\r\nX: y", "has letters that no URL has"),
    ("PAGES/none", "is answered with status 404"),
    ("PAGES/big.png", "has more than 52428800 bytes"),
    ("PAGES/round", "leads elsewhere more than 5 times"),
    ("PAGES/away", "leads to 'other.example'; want"),
    ("FOLDER/out.png", "names no file in the folder of --allowed-local-media-path"),
    ("FOLDER/../x.png", "names no file"),
    ("FOLDER", "names no file"),
    ("file://elsewhere/a.png", "names no file"),
    ("file:///\0", "names a file that cannot be read"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED)
async def test_what_cannot_be_got(clients: Any, pages: str, pictures: Path, given: str, words: str) -> None:
    given = given.replace("PAGES", pages).replace("FOLDER", pictures.as_uri())
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        await clients[0].chat.completions.create(model="tiny", messages=[turn("x", named(given))])
    assert refused.value.param == "messages[0].content[1].image_url.url"


async def test_what_else_is_refused(clients: Any) -> None:
    chat = clients[0].chat.completions.create
    for parts, words, param in (
        ([named(URL, detail="low")], "want auto, or nothing", "messages[0].content[0].image_url.detail"),
        ([named(URL, detail="sharp")], "want 'auto', 'high', 'low'", "messages[0].content[0].image_url.detail"),
        ([named(URL)] * 17, "messages has 17 images; want at most 16", "messages"),
        ([named(f"data:image/png;base64,{DATA[:200]}")], "brings image 1 of 1, which cannot be used", "messages"),
    ):
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            await chat(model="tiny", messages=[turn(*parts)])
        assert refused.value.param == param
    image = {"type": "input_image", "image_url": URL, "detail": "auto"}
    for role in ("system", "assistant"):
        with pytest.raises(openai.BadRequestError, match=f"has an image in a turn of the {role}"):
            await clients[0].responses.create(model="tiny", input=[{"role": role, "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="media_type"):
        source = {"type": "base64", "media_type": "text/html", "data": ""}
        await clients[1].messages.create(model="x", max_tokens=5, messages=[turn({"type": "image", "source": source})])


async def test_doors_without_leave(engine: TokenizerProcess, pages: str, pictures: Path) -> None:
    with http_process(engine, limit_mm_per_prompt={"image": 1}) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            for given, words in (
                (f"{pages}/a.png", "want a data: URL, or a host of --allowed-media-domains, and there are none"),
                ((pictures / "a b.png").as_uri(), "the engine runs without --allowed-local-media-path"),
            ):
                with pytest.raises(openai.BadRequestError, match=words):
                    await client.chat.completions.create(model="tiny", messages=[turn(named(given))])
            with pytest.raises(openai.BadRequestError, match="has 2 images; want at most 1"):
                await client.chat.completions.create(model="tiny", messages=[turn(named(URL), named(URL))])


async def test_models_that_see_nothing(folder: Path) -> None:
    with tokenizer_process(folder) as blind, http_process(blind) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="want text alone: images are not served with") as refused:
                await client.chat.completions.create(model="tiny", messages=[turn(named(URL))])
    assert (refused.value.param, refused.value.code) == ("messages", "not_supported")
