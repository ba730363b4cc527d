"""What of the engine's configuration and the model's limits the planner follows."""

from dataclasses import dataclass

from tercet.engine.speculation import SpeculativeConfig


@dataclass(frozen=True)
class PlannerSettings:
    """Names as in `EngineConfig` and `Limits`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    page_size: int
    run_ahead: int
    max_lease: int
    enable_prefix_caching: bool
    max_lease_ms: float = 2.0
    deterministic: bool = False
    max_queued_requests: int = 2**20
    max_queued_tokens: int = 2**40
    restart_window: float = 60.0
    speculation: SpeculativeConfig | None = None

    @property
    def looks_back(self) -> bool:
        """Whether workers look for something among all of a request's tokens."""
        return self.speculation is not None

    @property
    def most_followed(self) -> int:
        """Answers with a grammar that are followed at a time: those that run, and as many whose turn comes next."""
        return 2 * self.max_num_seqs

    def pages(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)
