"""What the progress bar of `LLM` says beside its count."""

from typing import Any

from tqdm import tqdm

from tercet.ipc.answers import Usage


class Rates:
    """Tokens a second, of prompts and of answers."""

    def __init__(self, bar: "tqdm[Any]") -> None:
        self._bar = bar
        self._num_prompt = self._num_generated = 0

    def count(self, usage: Usage) -> None:
        """One more is done."""
        self._num_prompt += usage.num_prompt_tokens
        self._num_generated += usage.num_generated_tokens
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.set_postfix_str(
            f"prefill {self._num_prompt / seconds:.0f} tok/s, decode {self._num_generated / seconds:.0f} tok/s",
            refresh=False,
        )
        self._bar.update()
