"""The prompt before its continuation (`echo` of completions), with log-probabilities if they are asked for.

What tokens and text a prompt has, the engine says.
"""

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from tercet.engine.openai_logprobs import CompletionLogprobs, Rows, completion_logprobs
from tercet.ipc.client import Client, Generation


class Echo(msgspec.Struct, frozen=True):
    """A prompt as its client gets it back."""

    text: str
    first_token: str
    """The only one that has no log-probability."""

    def logprobs(self, generation: Generation, num_top: int) -> CompletionLogprobs | None:
        """Of prompt and answer."""
        rows = [row[: 1 + num_top] for row in generation.prompt_logprobs or ()]
        answer = completion_logprobs(generation.logprobs, len(self.text))
        prompt = completion_logprobs(rows, 0)
        if answer is None or prompt is None:
            return None
        return CompletionLogprobs(
            [self.first_token, *prompt.tokens, *answer.tokens],
            [None, *prompt.token_logprobs, *answer.token_logprobs],
            [None, *prompt.top_logprobs, *answer.top_logprobs],
            [*self._offsets(rows), *answer.text_offset],
        )

    def _offsets(self, rows: Rows) -> list[int]:
        """A beginning of sequence that the tokenizer has added is a token and no text."""
        begins = len(self.first_token) if self.text.startswith(self.first_token) else 0
        return [0, *accumulate((len(row[0].text) for row in rows), initial=begins)][: 1 + len(rows)]


async def read_echoes(client: Client, prompts: Sequence[str | list[int]]) -> list[Echo]:
    """Raises `ClientError` for prompts that the engine refuses."""
    echoes = []
    for prompt in prompts:
        token_ids = await client.tokenize(prompt) if isinstance(prompt, str) else prompt
        text = prompt if isinstance(prompt, str) else await client.detokenize(prompt)
        echoes.append(Echo(text, await client.detokenize(token_ids[:1])))
    return echoes


def without_answer(generation: Generation) -> Generation:
    """Of what was asked for the sake of its prompt: `max_tokens` 0, where the engine has to say one token."""
    return msgspec.structs.replace(
        generation,
        text="",
        token_ids=[],
        reason="length",
        stop=None,
        logprobs=None if generation.logprobs is None else [],
        usage=msgspec.structs.replace(generation.usage, num_generated_tokens=0),
    )
