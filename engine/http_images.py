"""Images that requests name, to their files: from data: URLs, from hosts and from a folder, as the operator allows.

Whoever reads a request leaves a `NamedImage` where one is; here all of a conversation become files, at once. What is in
these is the tokenizer's matter.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from tercet.engine.config import EngineConfig
from tercet.engine.http_errors import ApiError
from tercet.engine.http_fetch import MAX_BYTES, Fetcher, FetchFailed
from tercet.engine.refusal import short
from tercet.ipc.content import ImagePart, Part
from tercet.ipc.messages import ChatMessage
from tercet.ipc.picture_files import bytes_of_data

_FLAG = "--allowed-local-media-path"


class NamedImage(ImagePart, frozen=True, tag_field="type", tag="image"):
    """One whose file is yet to be got: `url` says where it is, `where` in which place of the request that stood."""

    url: str
    where: str


def named_image(url: str, where: str) -> NamedImage:
    return NamedImage(b"", url, where)


class Images:
    """Of one door."""

    def __init__(self, config: EngineConfig) -> None:
        self._most = config.num_images_per_prompt
        self._fetcher = Fetcher(config.allowed_media_domains)
        given = config.allowed_local_media_path
        self._folder = None if given is None else Path(given).resolve()

    async def got(self, turns: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The same with all files in it. Raises `ApiError`."""
        named = [part for turn in turns for part in _parts(turn) if isinstance(part, NamedImage)]
        if not named:
            return list(turns)
        if len(named) > self._most:
            raise _refusal("messages", f"has {len(named)} images; want at most {self._most} (--limit-mm-per-prompt)")
        tasks = [asyncio.ensure_future(self._get(image)) for image in named]
        try:
            files = iter(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
        return [_with_files(turn, [_filled(part, files) for part in _parts(turn)]) for turn in turns]

    async def _get(self, image: NamedImage) -> ImagePart:
        kind = image.url.partition(":")[0].lower()
        match kind:
            case "data":
                return ImagePart(await asyncio.to_thread(_of_data, image))
            case "http" | "https":
                try:
                    return ImagePart(await self._fetcher.fetch(image.url))
                except FetchFailed as error:
                    raise _refusal(image.where, str(error)) from None
            case "file":
                return ImagePart(await asyncio.to_thread(self._of_folder, image))
            case _:
                raise _refusal(image.where, f"is {short(image.url)!r}; want a URL of data:, http:, https: or file:")

    def _of_folder(self, image: NamedImage) -> bytes:
        """Links are followed first: what they lead to counts."""
        if self._folder is None:
            raise _refusal(image.where, f"names a file, and the engine runs without {_FLAG}; want a data: URL")
        try:
            parts = urlsplit(image.url)
            path = Path(unquote(parts.path)).resolve()
            if parts.netloc not in ("", "localhost") or not path.is_relative_to(self._folder) or not path.is_file():
                raise _refusal(image.where, f"names no file in the folder of {_FLAG}, as file:///FOLDER/x.png would")
            if path.stat().st_size > MAX_BYTES:
                raise _refusal(image.where, f"names a file of more than {MAX_BYTES} bytes")
            return path.read_bytes()
        except (OSError, ValueError, RuntimeError):
            raise _refusal(image.where, "names a file that cannot be read") from None


def _of_data(image: NamedImage) -> bytes:
    try:
        return bytes_of_data(image.url)
    except ValueError as error:
        raise _refusal(image.where, str(error)) from None


def _parts(turn: ChatMessage) -> tuple[Part, ...]:
    return turn.content if isinstance(turn.content, tuple) else ()


def _filled(part: Part, files: Iterator[ImagePart]) -> Part:
    return next(files) if isinstance(part, NamedImage) else part


def _with_files(turn: ChatMessage, parts: Sequence[Part]) -> ChatMessage:
    return msgspec.structs.replace(turn, content=tuple(parts)) if parts else turn


def _refusal(where: str, what: str) -> ApiError:
    return ApiError(400, f"{where} {what}", param=where, code="invalid_request")
