"""What a planner counts. Knows names only."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Since the engine's start; workers may come and go."""

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    """Tokens of prompts, as are queries."""
    host_hits: int = 0
    """Those of them whose pages came from the host's memory, or the state behind them."""
    stored: int = 0
    """Pages copied to there, and back."""
    loaded: int = 0
    stored_states: int = 0
    """The same of states."""
    loaded_states: int = 0
    trials: int = 0
    """Of one request in one step, where it had something to guess."""
    guesses: int = 0
    right_guesses: int = 0
