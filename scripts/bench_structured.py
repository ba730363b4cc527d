"""What a grammar costs: the others, as tokens/s of plain streams alone, beside more of them, and beside answers that
have to match one; and, with `--answers`, these themselves, as tokens/s of so many at once without and with it.

All on one engine, in turn, so that what differs is the company, or the grammar.
"""

import argparse
import statistics
import time
from typing import Any

import anyio

from tercet.engine.config import EngineConfig
from tercet.engine.engine_process import EngineProcess
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams, Structured

_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "kind": {"enum": ["red", "green", "blue"]},
            "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        },
        "required": ["name", "kind", "size"],
        "additionalProperties": False,
    },
    "minItems": 10_000,
}
_COMPANY = ("none", "plain", "grammar")


def add_structured_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="folder, hub id, or `demo`")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--streams", type=int, default=8, help="plain streams that are measured")
    parser.add_argument("--beside", type=int, default=4, help="others that run meanwhile")
    parser.add_argument("--tokens", type=int, default=100, help="of each plain stream")
    parser.add_argument("--rounds", type=int, default=3, help="of each load")
    parser.add_argument("--answers", type=int, nargs="+", default=[], help="instead: so many at once, with and without")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks that share the model")


def run_structured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds of each load in turn; prints each, or the best."""
    config = EngineConfig(
        model=arguments.model,
        device=arguments.device,
        load_format=arguments.load_format,
        tensor_parallel_size=arguments.tensor_parallel_size,
        log_requests=False,
    )
    with EngineProcess(config) as engine:
        anyio.run(_round, engine.address, arguments, "grammar")  # the first grammar of an engine starts processes
        if arguments.answers:
            return _run_answers(engine.address, arguments)
        return _run_company(engine.address, arguments)


def _run_company(address: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print(f"{'beside them':12}{'tokens/s':>10}{'of each of these':>18}")
    for number in range(arguments.rounds * len(_COMPANY)):
        company = _COMPANY[number % len(_COMPANY)]
        rows.append({"company": company, **anyio.run(_round, address, arguments, company)})
        print(f"{company:12}{rows[-1]['tokens_per_s']:10.1f}{rows[-1]['beside_tokens_per_s']:18.1f}", flush=True)
    alone, *others = (
        statistics.median(row["tokens_per_s"] for row in rows if row["company"] == company) for company in _COMPANY
    )
    for company, figure in zip(_COMPANY[1:], others, strict=True):
        print(f"beside {company}: {figure / alone - 1:+.1%}")
    return rows


def _run_answers(address: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The best round of each, tokens/s of all together, and ms for a token of each."""
    rows: list[dict[str, Any]] = []
    print(f"{'answers':>8}{'tokens/s':>12}{'ms':>8}{'with grammar':>15}{'ms':>8}")
    for count in arguments.answers:
        row: dict[str, Any] = {"answers": count}
        for name in ("plain", "grammar"):
            rounds = (anyio.run(_answers, address, count, arguments.tokens, name) for _ in range(arguments.rounds))
            row[f"{name}_tokens_per_s"] = best = max(rounds)
            row[f"{name}_ms"] = 1e3 * count / best
        rows.append(row)
        plain, grammar = (f"{row[f'{name}_tokens_per_s']:.0f}" for name in ("plain", "grammar"))
        print(f"{count:8}{plain:>12}{row['plain_ms']:8.2f}{grammar:>15}{row['grammar_ms']:8.2f}", flush=True)
    return rows


async def _answers(address: str, count: int, num_tokens: int, name: str) -> float:
    """Tokens/s of `count` answers at once; those that end early count with what they said."""
    said = 0

    async def one(client: Client, index: int) -> None:
        nonlocal said
        answer = await client.generate(f"Things in room {index}, as JSON: ", _params(index, name, num_tokens))
        said += len(answer.token_ids)

    async with Client(address) as client:
        started = time.monotonic()
        async with anyio.create_task_group() as group:
            for index in range(count):
                group.start_soon(one, client, index)
        return said / (time.monotonic() - started)


def _params(index: int, name: str, num_tokens: int | None) -> SamplingParams:
    form = Structured(json_schema=_SCHEMA) if name == "grammar" else None
    return SamplingParams(temperature=1.0, seed=index, structured=form, max_tokens=num_tokens, ignore_eos=form is None)


async def _round(address: str, arguments: argparse.Namespace, company: str) -> dict[str, float]:
    """Tokens/s of all plain streams together, and of each of those beside them."""
    num_beside = 0

    async def plain(client: Client, index: int) -> None:
        await client.generate(f"Stream {index}: ", _params(index, "plain", arguments.tokens))

    async def beside(client: Client, index: int) -> None:
        nonlocal num_beside
        async for piece in client.stream(f"Things in room {index}, as JSON: ", _params(index, company, None)):
            num_beside += len(piece.token_ids)

    async with Client(address) as client, anyio.create_task_group() as others:
        if company != "none":
            for index in range(arguments.beside):
                others.start_soon(beside, client, index)
            while num_beside < 2 * arguments.beside:
                await anyio.sleep(0.01)
        started, before = time.monotonic(), num_beside
        async with anyio.create_task_group() as measured:
            for index in range(arguments.streams):
                measured.start_soon(plain, client, index)
        seconds = time.monotonic() - started
        others.cancel_scope.cancel()
    return {
        "tokens_per_s": arguments.streams * arguments.tokens / seconds,
        "beside_tokens_per_s": (num_beside - before) / arguments.beside / seconds,
    }
