"""The offline API: `LLM(model).generate(prompts, params)`. It starts the same processes as the daemon.

A synchronous face on the async client, whose event loop turns while somebody waits for answers: what a client owes an
idle engine, ZeroMQ's own threads do.
"""

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, Self

import msgspec
from tqdm import tqdm

from tercet.engine.borrowed_loop import BorrowedLoop
from tercet.engine.config import EngineConfig
from tercet.engine.each import Params, Result, each_of, for_each
from tercet.engine.engine_process import EngineProcess
from tercet.engine.llm_outputs import CompletionOutput, RequestOutput, is_ids, output_of
from tercet.engine.llm_pictures import ANSWERS_OF_PICTURES, as_turn, brings_pictures, patiently
from tercet.engine.llm_rates import Rates
from tercet.engine.prompt_list import Prompt, as_prompts, without_pictures
from tercet.engine.start_clock import StartClock
from tercet.ipc.answers import Classifier
from tercet.ipc.beam_search import Beam, BeamSearchParams, beam_search
from tercet.ipc.change_messages import WhatRuns
from tercet.ipc.client import Classification, Client, Embedding
from tercet.ipc.messages import ChatMessage, ChatOptions, ClassificationParams, EmbeddingParams, SamplingParams
from tercet.ipc.prompt import PlainPrompt

__all__ = ["LLM", "CompletionOutput", "RequestOutput"]

_WARM_UPS = 16
_WARM_UP_S = 0.5
_WARM_UP_TOKENS = 8
"""Fewer than a page: no prefix is cached of it."""


class LLM:
    """An engine for this program alone, ended with it, or when nobody has this object any more. A context manager.

    Options are the fields of `EngineConfig`; one that does not exist is a TypeError.
    """

    _open = False

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        known = {field.name for field in msgspec.structs.fields(EngineConfig)}
        if unknown := sorted(set(options) - known):
            raise TypeError(f"LLM got unknown options {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        # Nobody else asks, and `generate` bounds what it has in the engine by itself.
        own = {"max_queued_requests": 2**20, "max_queued_tokens": 2**40, "allow_changes": True}
        config = EngineConfig(model=os.fspath(model), **{**own, **options})
        self._owner = os.getpid()
        self._at_exit = functools.partial(_close, weakref.ref(self))
        self._closer: int | None = None
        """The thread that closes it now."""
        self._engine = EngineProcess(config)
        self._loop = BorrowedLoop()
        try:
            clock = StartClock()
            self._client = Client(self._engine.address, key=config.listen_key)
            self._loop.run(self._client.__aenter__)
            self._open = True
            self._engine.on_death(functools.partial(self._loop.soon, self._client.give_up))  # who waits is told
            # At a program's end `__del__` comes too late for threads and loops.
            atexit.register(self._at_exit)
            self._warm_up(config.data_parallel_size)
        except BaseException:
            self.close()
            raise
        clock.ended("first requests")
        self.start_phases = {**self._engine.start_phases, **clock.phases}
        """What the seconds of this start went to, in order: the engine's, then this object's own."""

    def _warm_up(self, num_replicas: int) -> None:
        """Python adapts code to what it does, and memory is touched, in the first dozen requests: better now.

        Not where a step is computed by the CPU, which takes its time.
        """
        limits = self._engine.limits
        if limits.device != "cpu" and limits.generates:
            prompt, params = [0] * min(_WARM_UP_TOKENS, limits.max_model_len - 1), SamplingParams(max_tokens=1)
            prompts = [prompt] * num_replicas  # at once: whoever has the least to do gets the next
            enough = time.monotonic() + _WARM_UP_S
            for _ in range(_WARM_UPS):
                self.generate(prompts, params, use_tqdm=False)
                if time.monotonic() > enough:
                    break

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt or many, texts or token ids, with one `params` for all or one for each; in order.

        Or texts that keep places for images: {"prompt": …, "multi_modal_data": {"image": one or a list}}.
        """
        return self._run(as_prompts(prompts), params, use_tqdm)

    def chat(
        self,
        messages: Sequence[dict[str, Any] | ChatMessage] | Sequence[Sequence[dict[str, Any] | ChatMessage]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: ChatOptions | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each a list of {"role": …, "content": …} or of `ChatMessage`; content is a
        text, or a list with images in it, as OpenAI has them. `options` are for all."""
        if not messages:
            return []
        if isinstance(messages, str | dict) or any(isinstance(one, str) for one in messages):
            raise TypeError(f"messages are {messages!r:.80}; want a list of {{'role': …, 'content': …}}, or of such")
        many: Sequence[Any] = [messages] if isinstance(messages[0], dict | ChatMessage) else messages
        conversations = [[as_turn(turn) for turn in conversation] for conversation in many]
        return self._run(conversations, params, use_tqdm, options)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[list[Beam]]:
        """For one prompt or many, texts or token ids, in order: the likeliest answers as wholes, best first."""
        self._check_open()
        return self._loop.run(lambda: self._search_all(without_pictures(prompts), params))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: EmbeddingParams | Sequence[EmbeddingParams] | None = None,
    ) -> list[Embedding]:
        """What the model makes of one prompt or many, texts or token ids; `params` as for `generate`; in order."""
        return self._make_all(prompts, params, EmbeddingParams, self._client.embed)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: ClassificationParams | Sequence[ClassificationParams] | None = None,
    ) -> list[Classification]:
        """What the head of a model that classifies makes of one prompt or many; as `embed`."""
        return self._make_all(prompts, params, ClassificationParams, self._client.classify)

    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        *,
        adapter: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[float]:
        """How near each of `second` is to `first`, or to its own of as many; see `Client.score`."""
        self._check_open()
        how: Any = {"adapter": adapter, "truncate_prompt_tokens": truncate_prompt_tokens}
        return self._loop.run(lambda: self._client.score(first, second, **how))

    def sleep(self, level: Literal[1, 2] = 1, *, mode: WhatRuns = "wait") -> None:
        """End the workers, so that all their memory is free, whichever `level` is named; see `Client.sleep`."""
        if level not in (1, 2):
            raise ValueError(f"level is {level!r}; want 1 or 2, which are the same here")
        self._change(lambda: self._client.sleep(mode))

    def wake_up(self, model: str | os.PathLike[str] | None = None) -> None:
        """Start the workers again, with the weights there were or with others; see `Client.wake_up`."""
        self._change(lambda: self._client.wake_up(None if model is None else os.fspath(model)))

    def update_weights(self, model: str | os.PathLike[str], *, mode: WhatRuns = "wait") -> None:
        """Go on with other weights of the same model; see `Client.update_weights`."""
        self._change(lambda: self._client.update_weights(os.fspath(model), mode))

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Have a LoRA adapter that requests may name; see `Client.load_adapter`."""
        self._change(lambda: self._client.load_adapter(name, os.fspath(folder)))

    def unload_adapter(self, name: str) -> None:
        """Forget it; see `Client.unload_adapter`."""
        self._change(lambda: self._client.unload_adapter(name))

    def _change(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._check_open()
        self._loop.run(make)

    @property
    def address(self) -> str:
        """Where this engine listens: a `Client` may ask it too, while this LLM is open."""
        return self._engine.address

    @property
    def classifier(self) -> Classifier | None:
        """The labels of `classify`'s logits, and what becomes of these; None: the model has no head that classifies."""
        return self._engine.limits.classifier

    @property
    def startup_seconds(self) -> float:
        return self._engine.startup_seconds

    def close(self) -> None:
        """End the engine's processes, even if interrupted. May be called twice; in a fork of the program, in vain.

        A signal's handler may call it, whatever of this object it interrupts: this call itself goes on behind it.
        """
        if os.getpid() != self._owner or self._closer == threading.get_ident():
            return
        self._closer = threading.get_ident()
        with contextlib.ExitStack() as ends:
            ends.callback(setattr, self, "_closer", None)
            ends.callback(self._engine.close)
            ends.callback(self._loop.close)
            if self._open:
                self._open = False
                self._loop.run(self._client.__aexit__)
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Whoever drops it wants its memory for another. In a fork it stays: ZeroMQ would wait for threads that are not
        there."""
        if self._open and os.getpid() == self._owner:
            self.close()
        elif self._open:
            atexit.register(self.close)

    def _check_open(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError("this LLM is that of the program of which this process is a fork; want one made here")
        if not self._open:
            raise RuntimeError("this LLM is closed")

    def _run(
        self, prompts: Sequence[Any], params: Any, use_tqdm: bool, options: ChatOptions | None = None
    ) -> list[RequestOutput]:
        self._check_open()
        each = for_each(params, SamplingParams, len(prompts))
        if not use_tqdm or sys.stderr is None:
            return self._loop.run(lambda: self._generate_all(prompts, each, options, None))
        with tqdm(total=len(prompts), desc="generate", unit="req") as bar:
            return self._loop.run(lambda: self._generate_all(prompts, each, options, Rates(bar)))

    async def _generate_all(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        options: ChatOptions | None,
        rates: Rates | None,
    ) -> list[RequestOutput]:
        async def one(index: int) -> RequestOutput:
            prompt = prompts[index]
            ask = functools.partial(self._client.generate_several, prompt, params[index], options=options)
            ask = functools.partial(ask, return_prompt_ids=not is_ids(prompt))
            generations = await (patiently(ask) if brings_pictures(prompt) else ask())
            output = output_of(prompt, generations)
            if rates is not None:
                rates.count(output.usage)
            return output

        weight = ANSWERS_OF_PICTURES if any(map(brings_pictures, prompts)) else 1
        return await each_of(one, len(prompts), max((weight, *(one.n for one in params))))

    def _make_all(
        self, prompts: Prompt | Sequence[Prompt], params: Any, kind: type[Params],
        make: Callable[[Any, Params], Coroutine[Any, Any, Result]],
    ) -> list[Result]:  # fmt: skip
        """What a model makes of prompts at once, without a text."""
        self._check_open()
        many = without_pictures(prompts)
        each = for_each(params, kind, len(many))
        return self._loop.run(lambda: each_of(lambda index: make(many[index], each[index]), len(many)))

    async def _search_all(self, prompts: Sequence[PlainPrompt], params: BeamSearchParams) -> list[list[Beam]]:
        return await each_of(
            lambda index: beam_search(self._client, prompts[index], params), len(prompts), max(1, params.beam_width)
        )


def _close(reference: "weakref.ref[LLM]") -> None:
    if (llm := reference()) is not None:
        llm.close()
