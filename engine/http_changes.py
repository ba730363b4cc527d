"""The HTTP door's routes by which the engine is changed while it runs, named as vLLM and SGLang have them."""

from collections.abc import Coroutine
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tercet.engine.http_body import read_body, read_query
from tercet.engine.http_door import Door
from tercet.engine.http_errors import from_engine
from tercet.engine.http_presence import unless_gone
from tercet.engine.openapi import RouteTypes
from tercet.ipc.change_messages import WhatRuns
from tercet.ipc.client import ClientError


class SleepRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What POST /sleep takes, as its body or behind its path."""

    level: Literal[1, 2] = 1
    """As vLLM has it. Here both free all memory, and the weights are read again from where they were."""
    mode: WhatRuns = "wait"


class WakeUpRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What POST /wake_up takes, likewise."""

    model: str | None = None


class UpdateWeightsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /update_weights."""

    model: str
    mode: WhatRuns = "wait"


class UpdateFromDiskRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same in SGLang's words."""

    model_path: str
    abort_all_requests: bool = False


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: Literal[False] = False


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: None = None


class Sleeping(msgspec.Struct, frozen=True):
    """The body of answers to /sleep, /wake_up and /is_sleeping."""

    is_sleeping: bool


class Success(msgspec.Struct, frozen=True):
    """The body of answers to /update_weights and /update_weights_from_disk."""

    success: bool
    message: str


async def _sleep(request: Request, door: Door) -> Response:
    body = await read_query(request, SleepRequest)
    await _change(request, door, door.client.sleep(body.mode))
    return _json(Sleeping(door.condition.is_asleep))


async def _wake_up(request: Request, door: Door) -> Response:
    body = await read_query(request, WakeUpRequest)
    await _change(request, door, door.client.wake_up(body.model))
    return _json(Sleeping(door.condition.is_asleep))


async def _is_sleeping(_: Request, door: Door) -> Response:
    await door.refresh()
    return _json(Sleeping(door.condition.is_asleep))


async def _update(request: Request, door: Door) -> Response:
    body = await read_body(request, UpdateWeightsRequest)
    return await _exchange(request, door, body.model, body.mode)


async def _update_from_disk(request: Request, door: Door) -> Response:
    body = await read_body(request, UpdateFromDiskRequest)
    return await _exchange(request, door, body.model_path, "abort" if body.abort_all_requests else "wait")


async def _exchange(request: Request, door: Door, model: str, mode: WhatRuns) -> Response:
    await _change(request, door, door.client.update_weights(model, mode))
    return _json(Success(True, f"the weights are those of {model}"))


async def _load(request: Request, door: Door) -> Response:
    body = await read_body(request, LoadAdapterRequest)
    await _change(request, door, door.client.load_adapter(body.lora_name, body.lora_path))
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")


async def _unload(request: Request, door: Door) -> Response:
    body = await read_body(request, UnloadAdapterRequest)
    await _change(request, door, door.client.unload_adapter(body.lora_name))
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")


async def _change(request: Request, door: Door, making: Coroutine[Any, Any, None]) -> None:
    """It goes on if its client leaves."""
    try:
        await unless_gone(request.receive, making)
    except ClientError as error:
        raise from_engine(error, {"prompt": "model", "name": "lora_name"}) from None
    await door.refresh()


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


CHANGE_ROUTES = [
    (RouteTypes("POST", "/sleep", "Have the workers end", SleepRequest, Sleeping, by_query=True), _sleep),
    (RouteTypes("POST", "/wake_up", "Have them started again", WakeUpRequest, Sleeping, by_query=True), _wake_up),
    (RouteTypes("GET", "/is_sleeping", "Whether there are no workers", gives=Sleeping), _is_sleeping),
    (RouteTypes("POST", "/v1/load_lora_adapter", "Have one more adapter", LoadAdapterRequest), _load),
    (RouteTypes("POST", "/v1/unload_lora_adapter", "Forget an adapter", UnloadAdapterRequest), _unload),
    (RouteTypes("POST", "/update_weights", "Exchange the weights", UpdateWeightsRequest, Success), _update),
    (
        RouteTypes("POST", "/update_weights_from_disk", "The same in SGLang's words", UpdateFromDiskRequest, Success),
        _update_from_disk,
    ),
]
