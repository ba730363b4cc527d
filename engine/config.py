"""EngineConfig: every setting of an engine, checked once, with messages that name the flag.

It travels to each child process as JSON. It knows nothing of a checkpoint's contents.
"""

from typing import Literal, get_args

import msgspec

from tercet.engine.adapter_names import read_adapters
from tercet.engine.generation_defaults import GenerationDefaults, own_defaults
from tercet.engine.http_address import check_http, check_origins
from tercet.engine.image_settings import ImageLimits, ProcessorSettings, check_media, image_limits, processor_settings
from tercet.engine.speculation import SpeculativeConfig, speculative_config
from tercet.ipc.addresses import check_listen_address
from tercet.ipc.answers import ToolFormat
from tercet.ipc.keys import check_key

Device = Literal["auto", "cuda", "cpu"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
KvCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
StateDType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "fp8"]
ActivationDType = Literal["auto", "fp8"]
GenerationConfig = Literal["auto", "none"]
LoadFormat = Literal["auto", "dummy", "null"]
ToolCallParser = Literal["auto", ToolFormat]
ReasoningParser = Literal["auto", "none", "think"]

PAGE_SIZES = (16, 32, 64, 128)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine. Field `x_y` is flag `--x-y` of `scripts/serve.py`."""

    model: str
    """Folder, .gguf file, hub id, or `demo`."""
    served_model_name: str | None = None
    adapter: tuple[str, ...] = ()
    """NAME=FOLDER each: a LoRA adapter of the model, in PEFT's layout, or a hub id. Requests say NAME."""
    max_adapters: int = 0
    """Places for adapters that come and go while the engine runs, those of `adapter` among them; 0: there are those."""
    max_adapter_rank: int = 16
    """Of what is in a place. Memory is taken for as much, whatever is there."""
    classifier_tokens: tuple[str, ...] = ()
    """One token or two, by which a model that writes text classifies: the last one's logit, less the other's."""
    chat_template: str | None = None
    """File: what makes prompts of conversations, in Jinja; None: as the checkpoint has it."""
    generation_config: GenerationConfig = "auto"
    """auto: where a request says nothing, what the checkpoint wants; none: neutral values."""
    override_generation_config: GenerationDefaults | None = None
    """In place of what either wants; a map of its fields will do."""
    pair_template: str | None = None
    """File: what is written around two texts that are classified as a pair, in Jinja; None: as the tokenizer has it."""
    device: Device = "auto"
    dtype: DType = "auto"
    """auto: the checkpoint's own type on a GPU, float32 on the CPU."""
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    """Replicas of the model, with their own ranks, caches and queues, behind the same doors. What bounds steps, caches
    and queues is for each of them."""
    load_format: LoadFormat = "auto"
    """dummy: random weights of the checkpoint's shape; null: no model at all, to measure the engine around it."""
    null_step_ms: float = 0.0
    """A null model's step takes so long, as if a device computed it."""
    seed: int = 0
    """Seeds the dummy weights and the seeds of requests that bring none."""

    max_model_len: int | None = None
    """Prompt plus answer, in tokens; None: what the checkpoint allows."""
    max_num_seqs: int = 256
    """Most requests in one step."""
    max_num_batched_tokens: int = 8192
    """Most tokens in one step."""
    page_size: int = 64
    """Tokens in a page of the KV cache."""
    kv_cache_dtype: KvCacheDType = "auto"
    """auto: `dtype`; fp8: keys and values in 8 bits each, of the kind e4m3, unscaled. Twice as many tokens fit in."""
    kv_cache_memory: int | None = None
    """Bytes of KV cache per rank; None: on a GPU what is free under gpu_memory_utilization, on the CPU 1 GiB."""
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    kv_offloading_size: int | None = None
    """Bytes of the host's memory for copies of full pages, and of states where layers carry some, from which those come
    back that left the cache: of each replica, divided among its ranks. None: no copies are made."""
    state_dtype: StateDType = "auto"
    """What layers that carry a state keep it in, from token to token; auto: float32. In 16 bits half as much is read
    and kept of each request, and answers differ by what is rounded away."""
    quantization: Quantization = "auto"
    """fp8: plain weights of layers are rounded to 8 bits while they are read, a scale for each row; auto: they are as
    the checkpoint has them."""
    activation_dtype: ActivationDType = "auto"
    """fp8: where a step has many rows, products with weights in FP8 round those to 8 bits, too; auto: rows are
    multiplied as they are. On Hopper GPUs."""
    kept_states: int = 64
    """Copies of states that later prompts may begin from; only for models that carry a state."""
    run_ahead: int = 2
    """Plans in flight: how far the scheduler runs ahead of the workers."""
    max_lease: int = 4
    """Most decode steps granted by one plan while nothing waits."""
    max_lease_ms: float = 2.0
    """Of slow steps, no more than take about this long, but one: a new prompt waits for all that is granted."""
    deterministic: bool = False
    """Batch invariance, to the bit."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    allow_changes: bool = False
    """Clients may put the engine to sleep and wake it up, exchange its weights, and load and unload adapters, while it
    runs."""
    speculative_config: SpeculativeConfig | None = None
    """Try tokens that may come next, several in a step; a map of its fields will do. The tokens are the same."""

    limit_mm_per_prompt: ImageLimits | None = None
    """Images that a request may bring, 16 where nothing is said; a map of its fields will do."""
    mm_processor_kwargs: ProcessorSettings | None = None
    """Pixels that images have when the model sees them; None: as the checkpoint has it. A map will do."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts from which the HTTP door fetches images that a request names; empty: from none."""
    allowed_local_media_path: str | None = None
    """Folder of which requests to the HTTP door may name images, as file://…; None: of none."""

    keep_cores_awake: bool | None = None
    """While a first token is awaited; None: where a GPU computes and no container's quota of processor time counts it.
    """

    max_queued_requests: int = 8192
    """Most requests that wait for a slot; one more is refused with a hint when to ask again."""
    max_queued_tokens: int = 2**24
    """Most tokens that the waiting requests may bring."""

    listen: tuple[str, ...] = ()
    """Where clients connect: ipc://… or tcp://127.0.0.1:PORT; empty: a socket in the engine's private directory."""
    listen_key: str | None = None
    """Clients need it, and all is encrypted; asked for beyond loopback."""
    http: str | None = None
    """HOST:PORT of the OpenAI-compatible HTTP door; None: no such door."""
    api_key: tuple[str, ...] = ()
    """Each of these opens the HTTP door; empty: whoever reaches it may come in."""
    allowed_origins: tuple[str, ...] = ()
    """Pages of these may read what the HTTP door says, as https://chat.example.com, or `*`: of all; empty: of none."""
    tool_call_parser: ToolCallParser = "auto"
    """How the model writes tool calls; auto: as its chat template shows."""
    reasoning_parser: ReasoningParser = "auto"
    log_requests: bool = True
    """The HTTP door writes a line for each request; never what was said."""
    take_over: bool = False
    """Load everything, then wait for the engine that has the addresses to leave them."""
    startup_timeout: float = 600.0
    """Seconds until the engine must be ready."""
    drain_timeout: float = 30.0
    """Seconds that running requests get after SIGTERM."""
    heartbeat_timeout: float = 10.0
    """Seconds of silence after which a process counts as hung; it is killed and started again."""
    max_restarts: int = 5
    """Deaths of one process within `restart_window` that are made good; one more ends the engine."""
    restart_window: float = 60.0

    trace_dir: str | None = None
    """Folder where each process records what it did when; `scripts/bench.py trace` makes a picture of it."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "speculative_config", speculative_config(self.speculative_config))
        own = own_defaults(self.override_generation_config)
        msgspec.structs.force_setattr(self, "override_generation_config", own)
        msgspec.structs.force_setattr(self, "limit_mm_per_prompt", image_limits(self.limit_mm_per_prompt))
        settings = processor_settings(self.mm_processor_kwargs)
        msgspec.structs.force_setattr(self, "mm_processor_kwargs", settings)
        for name in ("model", "served_model_name"):
            if getattr(self, name) == "":
                raise ValueError(f"{_flag(name)} is empty; want a name")
        _check_choice("device", self.device, get_args(Device))
        _check_choice("dtype", self.dtype, get_args(DType))
        _check_choice("kv-cache-dtype", self.kv_cache_dtype, get_args(KvCacheDType))
        _check_choice("state-dtype", self.state_dtype, get_args(StateDType))
        _check_choice("quantization", self.quantization, get_args(Quantization))
        _check_choice("activation-dtype", self.activation_dtype, get_args(ActivationDType))
        _check_choice("generation-config", self.generation_config, get_args(GenerationConfig))
        _check_choice("load-format", self.load_format, get_args(LoadFormat))
        _check_choice("tool-call-parser", self.tool_call_parser, get_args(ToolCallParser))
        _check_choice("reasoning-parser", self.reasoning_parser, get_args(ReasoningParser))
        _check_choice("page-size", self.page_size, PAGE_SIZES)
        self._check_types()
        for name in ("tensor_parallel_size", "max_num_batched_tokens", "run_ahead", "max_lease"):
            _check_range(name, getattr(self, name), 1, 2**20)
        _check_range("data_parallel_size", self.data_parallel_size, 1, 64)
        _check_range("max_num_seqs", self.max_num_seqs, 1, 4096)  # kernels that plan a step compile for so many rows
        _check_range("max_lease_ms", self.max_lease_ms, 0.0, 1e6)
        _check_range("null_step_ms", self.null_step_ms, 0.0, 1e6)
        if self.null_step_ms and self.load_format != "null":
            raise ValueError(f"--null-step-ms got {self.null_step_ms!r}; want it with --load-format null only")
        if self.max_model_len is not None:
            _check_range("max_model_len", self.max_model_len, 2, 2**24)
        if self.kv_cache_memory is not None:
            _check_range("kv_cache_memory", self.kv_cache_memory, 1, 2**50)
        if self.kv_offloading_size is not None:
            _check_range("kv_offloading_size", self.kv_offloading_size, 1, 2**50)
            if not self.enable_prefix_caching:
                raise ValueError("--kv-offloading-size came with --no-enable-prefix-caching; want one of them")
        _check_range("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        _check_range("startup_timeout", self.startup_timeout, 0.1, 86400.0)
        _check_range("drain_timeout", self.drain_timeout, 0.0, 86400.0)
        _check_range("max_queued_requests", self.max_queued_requests, 1, 2**40)
        _check_range("max_queued_tokens", self.max_queued_tokens, 1, 2**40)
        _check_range("heartbeat_timeout", self.heartbeat_timeout, 1.0, 86400.0)
        _check_range("kept_states", self.kept_states, 0, 65536)
        _check_range("max_restarts", self.max_restarts, 0, 2**20)
        _check_range("restart_window", self.restart_window, 0.1, 86400.0)
        _check_range("seed", self.seed, 0, 2**63 - 1)
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}; want at least --max-num-seqs "
                f"({self.max_num_seqs}), so that a step can hold every running request"
            )
        if self.deterministic and self.state_dtype in ("bfloat16", "float16"):
            raise ValueError(
                f"--state-dtype got {self.state_dtype!r} with --deterministic; want float32: else a state is rounded "
                "where a prompt happens to be cut"
            )
        if self.deterministic and self.activation_dtype != "auto":
            raise ValueError(
                f"--activation-dtype got {self.activation_dtype!r} with --deterministic; want auto: else a row is "
                "rounded where many others are beside it"
            )
        for address in self.listen:
            check_listen_address(address, keyed=self.listen_key is not None)
            if self.listen.count(address) > 1:
                raise ValueError(f"--listen got {address!r} more than once; want each address once")
        if self.listen_key is not None:
            check_key(self.listen_key)
        check_http(self.http, self.api_key)
        check_origins(self.allowed_origins, self.http)
        check_media(self.allowed_media_domains, self.allowed_local_media_path, self.http)
        if f"tcp://{self.http}" in self.listen:
            raise ValueError(f"--http got {self.http!r}, where --listen is; want another port for one of them")
        if len(self.classifier_tokens) > 2 or not all(self.classifier_tokens):
            given = " ".join(map(repr, self.classifier_tokens))
            raise ValueError(f"--classifier-tokens got {given}; want one token, or two, as in no yes")
        if self.classifier_tokens and self.load_format == "null":
            raise ValueError("--classifier-tokens came with --load-format null, which has no logits; want one of them")
        _check_range("max_adapters", self.max_adapters, 0, 1024)
        _check_range("max_adapter_rank", self.max_adapter_rank, 1, 512)
        if 0 < self.max_adapters < len(self.adapter):
            wanted = f"{len(self.adapter)} or more, as there are of --adapter, or 0"
            raise ValueError(f"--max-adapters got {self.max_adapters}; want {wanted}")
        served = self.served_model_name or self.model
        if served in read_adapters(self.adapter):
            raise ValueError(f"--adapter got the name {served!r}, which is the model's; want another")

    @property
    def num_images_per_prompt(self) -> int:
        """0: no request may bring any, and what looks at images is not loaded."""
        return (self.limit_mm_per_prompt or ImageLimits()).image

    @property
    def sees(self) -> bool:
        """Whether requests may bring images, if the model can see. A layer from another checkpoint has turns of its
        own, and none for images."""
        tries = self.speculative_config
        return self.num_images_per_prompt > 0 and (tries is None or tries.method != "eagle3")

    def _check_types(self) -> None:
        """Of values that no parser of flags made."""
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
                msgspec.json.encode(value)  # as children get it
            except (msgspec.ValidationError, UnicodeEncodeError) as error:
                shown = type(value).__name__ if field.name in ("listen_key", "api_key") else repr(value)
                wanted = "want UTF-8" if isinstance(error, UnicodeEncodeError) else error
                raise ValueError(f"{_flag(field.name)} got {shown}; {wanted}") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{_flag(name)} got {value!r}; want one of {', '.join(map(str, allowed))}")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise ValueError(f"{_flag(name)} got {value!r}; want {low} to {high}")
