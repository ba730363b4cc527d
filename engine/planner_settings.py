"""What of the engine's configuration and the model's limits the planner follows."""

from dataclasses import dataclass, replace

from tercet.engine.config import EngineConfig
from tercet.engine.page_need import PageNeed
from tercet.engine.speculation import SpeculativeConfig
from tercet.ipc.process_messages import Limits, WorkersRestarted


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
    speculation: SpeculativeConfig | None = None
    state_tile: int = 0
    kept_states: int = 0
    num_host_pages: int = 0
    page_bytes: int = 0
    num_host_states: int = 0
    state_bytes: int = 0
    image_tokens: int = 0
    windows: tuple[int, ...] = (0,)
    had_other_weights: bool = False

    @property
    def generates_again(self) -> bool:
        """Whether what a request comes back with is generated once more, which gives the same if weights are."""
        return self.deterministic and not self.had_other_weights

    @property
    def looks_back(self) -> bool:
        """Whether workers look for something among all of a request's tokens."""
        return self.speculation is not None and self.speculation.looked_up is not None

    @property
    def most_followed(self) -> int:
        """Answers with a grammar that are followed at a time: those that run, and as many whose turn comes next."""
        return 2 * self.max_num_seqs

    @property
    def need(self) -> PageNeed:
        """How many pages requests need."""
        return PageNeed(self.windows, self.page_size, max(self.image_tokens, 1))

    def after(self, message: WorkersRestarted) -> "PlannerSettings":
        """With these workers."""
        had_others = self.had_other_weights or message.other_weights
        limits = message.limits
        return replace(
            self,
            num_pages=limits.num_pages,
            num_host_pages=limits.num_host_pages,
            num_host_states=limits.num_host_states,
            had_other_weights=had_others,
        )


def make_settings(config: EngineConfig, limits: Limits) -> PlannerSettings:
    """Both together."""
    return PlannerSettings(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        num_pages=limits.num_pages,
        page_size=config.page_size,
        run_ahead=config.run_ahead,
        max_lease=config.max_lease,
        max_lease_ms=config.max_lease_ms,
        enable_prefix_caching=config.enable_prefix_caching,
        deterministic=config.deterministic,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        speculation=config.speculative_config,
        state_tile=limits.state_tile,
        kept_states=num_kept_states(config) if limits.state_tile else 0,
        num_host_pages=limits.num_host_pages,
        page_bytes=limits.page_bytes,
        num_host_states=limits.num_host_states,
        state_bytes=limits.state_bytes,
        image_tokens=limits.image_tokens,
        windows=limits.windows,
    )


def num_kept_states(config: EngineConfig) -> int:
    """Copies of states there are places for, of a model that carries any: workers and scheduler have to agree."""
    return config.kept_states if config.enable_prefix_caching else 0


def check_at_once(max_num_seqs: int, max_num_batched_tokens: int, at_once: int, why: str) -> None:
    """Refuse settings by which a prompt might never get on: beside all others that decode it needs room for so many
    tokens, as `why` ends in."""
    if at_once and max_num_batched_tokens < max_num_seqs + at_once:
        raise ValueError(
            f"--max-num-batched-tokens is {max_num_batched_tokens}; want at least {max_num_seqs + at_once}: "
            f"--max-num-seqs ({max_num_seqs}) and {at_once}, since this model {why}"
        )
