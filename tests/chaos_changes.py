"""Changes of an engine under traffic and faults that change no answer: its weights from another folder that has the
same, and an adapter that nobody asks for."""

import random
from pathlib import Path

import anyio

from chaos_traffic import Record, Traffic
from tercet.ipc.client import Client, ClientError

_MAY_FAIL = {"change_failed", "invalid_request", "not_found"}
"""Somebody who was needed has died; or the adapter is there already, or is not."""
_SECONDS = 150.0
GUEST = "guest"


async def change_on(
    address: str, folders: list[Path], adapter: Path, traffic: Traffic, record: Record, seed: int
) -> None:
    """One change after the other. `folders`: with the same weights."""
    draw = random.Random(f"{seed} changes")
    async with Client(address) as client:
        while not traffic.stopping:
            await anyio.sleep(draw.uniform(0.1, 2.0))
            what = draw.choice(["weights, wait", "weights, keep", "load", "unload"])
            try:
                with anyio.fail_after(_SECONDS):
                    match what:
                        case "load":
                            await client.load_adapter(GUEST, str(adapter))
                        case "unload":
                            await client.unload_adapter(GUEST)
                        case _:
                            mode = "keep" if what.endswith("keep") else "wait"
                            await client.update_weights(str(draw.choice(folders)), mode)
                record.changes[what] += 1
            except TimeoutError:
                record.wrong.append(f"{what} had not ended after {_SECONDS:g} s")
            except ClientError as error:
                record.changes[f"{what}, not done"] += 1
                if error.code not in _MAY_FAIL:
                    record.wrong.append(f"{what} ended with {error!r}")
