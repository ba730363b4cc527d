"""The async client: continue texts, token ids or conversations, many at once, streamed or whole; or embed or classify
them.

One connection carries all requests of a client. Leaving a stream, or cancelling the task that waits, cancels the
request in the engine. When the connection ends, the client makes a new one and asks for the rest of every answer: a
tokenizer that was killed is a pause.
"""

from collections.abc import AsyncIterator, Sequence

from tercet.ipc.call import Call, Generation, Piece
from tercet.ipc.change_messages import LoadAdapter, Sleep, UnloadAdapter, UpdateWeights, WakeUp, WhatRuns
from tercet.ipc.connected import Connected
from tercet.ipc.embed_call import Classification, ClassifyCall, EmbedCall, Embedding
from tercet.ipc.errors import ClientError, EngineDied, Overloaded, RequestRefused, RequestTimedOut
from tercet.ipc.messages import ChatOptions, ClassificationParams, EmbeddingParams, Handling, SamplingParams
from tercet.ipc.picture_files import with_files
from tercet.ipc.prompt import Prompt, make_classify, make_embed, make_request
from tercet.ipc.scores import in_pairs, scores

__all__ = [
    "Classification",
    "Client",
    "ClientError",
    "Embedding",
    "EngineDied",
    "Generation",
    "Overloaded",
    "Piece",
    "Prompt",
    "RequestRefused",
    "RequestTimedOut",
]


class Client(Connected):
    """A connection to one engine; use it as an async context manager, in one event loop."""

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: ChatOptions | None = None,
        cache_salt: str = "",
        priority: int = 0,
        queue_timeout: float | None = None,
        timeout: float | None = None,
        return_prompt_ids: bool = False,
        keep_logprobs: bool = True,
    ) -> AsyncIterator[Piece]:
        """The answer, piece by piece; of n answers, each piece is of one (`index`). Leaving the loop cancels them all.

        `options`: tools and more, for a conversation's chat template. Requests of lower `priority` go first.
        `queue_timeout`: seconds that it may wait before it is begun; `timeout`: that it may take in all. With
        `return_prompt_ids` the first piece has the prompt's. Without `keep_logprobs` the whole in the last has none.
        """
        handling = Handling(priority=priority, queue_timeout=queue_timeout, return_prompt_ids=return_prompt_ids)
        request = make_request(await with_files(prompt), params, cache_salt, handling, options)
        call = Call(request, True, timeout, keep_logprobs)
        await self._start(call)
        try:
            async for piece in call.pieces():
                yield piece
        finally:
            self._calls.close(call)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: ChatOptions | None = None,
        cache_salt: str = "",
        priority: int = 0,
        queue_timeout: float | None = None,
        timeout: float | None = None,
        return_prompt_ids: bool = False,
    ) -> Generation:
        """The whole answer; arguments as of `stream`. Cancelling the task cancels the request."""
        handling = Handling(priority=priority, queue_timeout=queue_timeout, return_prompt_ids=return_prompt_ids)
        request = make_request(await with_files(prompt), params, cache_salt, handling, options)
        if (n := request.params.n) > 1:
            raise ValueError(f"n is {n}, and generate gives one answer; want generate_several, or stream")
        return (await self._whole(Call(request, False, timeout)))[0]

    async def generate_several(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        options: ChatOptions | None = None,
        cache_salt: str = "",
        priority: int = 0,
        queue_timeout: float | None = None,
        timeout: float | None = None,
        return_prompt_ids: bool = False,
    ) -> list[Generation]:
        """`params.n` answers to one prompt, which is computed once; answer i is what `seed` + i would say alone."""
        handling = Handling(priority=priority, queue_timeout=queue_timeout, return_prompt_ids=return_prompt_ids)
        request = make_request(await with_files(prompt), params, cache_salt, handling, options)
        return await self._whole(Call(request, False, timeout))

    async def embed(
        self,
        prompt: str | Sequence[int],
        params: EmbeddingParams | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        queue_timeout: float | None = None,
        timeout: float | None = None,
    ) -> Embedding:
        """What the model makes of a text or of token ids: its last hidden state. Cancelling the task cancels it."""
        handling = Handling(priority=priority, queue_timeout=queue_timeout)
        return await self._whole(EmbedCall(make_embed(prompt, params, cache_salt, handling), timeout))

    async def classify(
        self,
        prompt: str | Sequence[int],
        params: ClassificationParams | None = None,
        *,
        pair: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
        queue_timeout: float | None = None,
        timeout: float | None = None,
    ) -> Classification:
        """What the model's head makes of a text or of token ids, if it has one that classifies (`info().classifier`).

        `pair`: a second text, which the tokenizer encodes with the first. Cancelling the task cancels the request.
        """
        handling = Handling(priority=priority, queue_timeout=queue_timeout)
        return await self._whole(ClassifyCall(make_classify(prompt, params, pair, cache_salt, handling), timeout))

    async def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        *,
        adapter: str | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
        priority: int = 0,
        queue_timeout: float | None = None,
        timeout: float | None = None,
    ) -> list[float]:
        """How near each of `second` is to `first`, or to its own of as many: a query's documents, say.

        By the model's head, if it has one of one label, else the cosine of two embeddings. `queue_timeout` and
        `timeout` are of each prompt. Cancelling the task cancels all.
        """
        handling = {
            "cache_salt": cache_salt, "priority": priority, "queue_timeout": queue_timeout, "timeout": timeout
        }  # fmt: skip
        pairs = in_pairs(first, second)
        return await scores(self, pairs, adapter=adapter, cut=truncate_prompt_tokens, **handling)

    async def sleep(self, mode: WhatRuns = "wait") -> None:
        """End the engine's workers, so that their memory is free; new requests are refused until `wake_up`.

        Those that run end first (`wait`), or are ended (`abort`: they fail as `Overloaded`), or go on once the engine
        is awake, behind what they have said (`keep`). As all changes of an engine it goes on if the task is cancelled,
        and takes an engine with `--allow-changes`.
        """
        await self._change(Sleep("", mode))

    async def wake_up(self, model: str | None = None) -> None:
        """Start the workers again: on other weights, if `model` says where (see `update_weights`)."""
        await self._change(WakeUp("", model))

    async def update_weights(self, model: str, mode: WhatRuns = "wait") -> None:
        """Go on with other weights of the same model: a folder or .gguf file on the engine's machine, or a hub id.

        What runs ends first, is ended, or goes on with the new weights behind what it has said (`keep`). New requests
        wait. If this fails, the engine has the weights it had.
        """
        await self._change(UpdateWeights("", model, mode))

    async def load_adapter(self, name: str, folder: str) -> None:
        """Have a LoRA adapter that requests may name, of an engine with `--max-adapters`. `folder`: on the engine's
        machine, in PEFT's layout, or a hub id; it stays there as long as the adapter is loaded."""
        await self._change(LoadAdapter("", name, folder))

    async def unload_adapter(self, name: str) -> None:
        """Nobody may name it from now on; done when those have ended who have named it, and its place is free."""
        await self._change(UnloadAdapter("", name))
