"""Files from other hosts: what servers may answer, well or badly. The test writes each answer byte by byte."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tercet.engine import http_fetch
from tercet.engine.http_fetch import Fetcher, FetchFailed


@asynccontextmanager
async def answering(*pieces: bytes, stays: bool = False) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A URL of a server that says this, and what it was asked. `stays`: it does not hang up."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        if stays:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a%20b.png?x=1&y=[2]#z", asked
    finally:
        server.close()
        await server.wait_closed()


async def fetched(url: str) -> bytes:
    return await Fetcher(("127.0.0.1",)).fetch(url)


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        (OK + b"Content-Length: 5\r\n\r\nhe", b"llo"),
        (OK[:7], OK[7:] + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n", b"2\r\nlo\r\n0\r\n\r\n"),
        (OK + b"\r\nhel", b"lo"),  # it ends with the connection
        (b"HTTP/1.0 200 OK\r\nContent-Encoding: identity\r\n\r\nhello",),
    ],
)
async def test_answers(pieces: tuple[bytes, ...]) -> None:
    async with answering(*pieces) as (url, asked):
        assert await fetched(url) == b"hello"
    (request,) = asked
    line, host, *_ = request.split(b"\r\n")
    assert line == b"GET /a%20b.png?x=1&y=%5B2%5D HTTP/1.1"
    assert host == b"Host: " + url.split("/")[2].encode()


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ((), "ends before it is whole"),
        ((OK + b"Content-Length: 5\r\n\r\nhe",), "ends before it is whole"),
        ((OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n",), "ends before it is whole"),
        ((b"SSH-2.0-x\r\n",), "is answered with what is no HTTP"),
        ((OK + b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",), "comes with Content-Encoding gzip"),
        ((b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n",), "is answered with status 403"),
        ((b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n",), "is answered with status 302"),
        ((b"HTTP/1.1 302 Found\r\nLocation: ftp://127.0.0.1/\r\n\r\n",), "is no URL of a host's"),
        ((b"HTTP/1.1 302 Found\r\nLocation: //example.org/\r\n\r\n",), "leads to 'example.org'; want"),
        ((OK, *[b"X: " + b"y" * 1000 + b"\r\n"] * 80), "headers without end"),
        ((OK + b"\r\n" + b"x" * 2000,), "has more than 1000 bytes"),
        ((OK + b"Content-Length: 2000\r\n\r\n" + b"x" * 2000,), "has more than 1000 bytes"),
    ],
)
async def test_answers_that_are_none(pieces: tuple[bytes, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fetch, "MAX_BYTES", 1000)
    async with answering(*pieces) as (url, _):
        with pytest.raises(FetchFailed, match=words):
            await fetched(url)


async def test_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fetch, "_SECONDS", 0.05)
    async with answering(OK, stays=True) as (url, _):
        with pytest.raises(FetchFailed, match=r"did not come within 0\.05 s"):
            await fetched(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1\\@example.org/",
        "http://127.0.0.1 .example.org/",
        "http://127.0.0.1\t/",
        "http://\u0131example.org/",
        "http://127.0.0.1:x/",
        "http:///a.png",
        "http://[::1/",
        "http://me:word@127.0.0.1/",
        "https://127.0.0.1.example.org/",
        "http://127.1/",
    ],
)
async def test_places_that_are_not_allowed(url: str) -> None:
    with pytest.raises(FetchFailed):
        await asyncio.wait_for(fetched(url), 1)
