"""The prompt before its continuation (`echo` of completions), with log-probabilities if they are asked for.

What tokens and text a prompt has, the engine says.
"""

from collections.abc import Sequence
from itertools import chain

import msgspec

from tercet.engine.json_parts import run
from tercet.engine.openai_logprobs import Columns, Rows, columns
from tercet.ipc.client import Client, Generation


class Echo(msgspec.Struct, frozen=True):
    """A prompt as its client gets it back."""

    text: str
    first_token: str
    """The only one that has no log-probability."""

    def columns(self, rows: Rows, num_top: int) -> Columns:
        """Of the prompt, whose tokens but the first have `rows`."""
        others = columns(rows, self._second_begins(rows), num_top)
        return Columns(
            chain([run([self.first_token])], others.tokens),
            chain([run([None])], others.token_logprobs),
            chain([run([None])], others.top_logprobs),
            chain([run([0])], others.text_offset),
        )

    def _second_begins(self, rows: Rows) -> int:
        """Where the second token begins: before the text, if that lacks its space."""
        if self.text.startswith(self.first_token.rstrip("\N{REPLACEMENT CHARACTER}")):  # a part of a character
            return len(self.first_token)
        # The first is a beginning of sequence that the tokenizer has added, and no text. Then one as of Llama 2 writes
        # a space before the first word, and takes it off the text.
        second = rows[0][0].text if rows else ""
        return -1 if second.startswith(" ") and not self.text.startswith(" ") else 0


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
