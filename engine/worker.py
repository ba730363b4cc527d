"""PROCESS worker: one rank of the model. It runs the plans it is sent, in order, and answers with tokens (rank 0).

The only file of the engine that knows the model. It knows no text, no request, and no policy about pages.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from tercet.engine import child
from tercet.engine.beside_steps import BesideSteps
from tercet.engine.child import SupervisorLink
from tercet.engine.compiler_process import (
    CompilerSpec,
    guess_settings,
    most_image_tokens,
    open_configured,
    steps_of,
    tables_of,
)
from tercet.engine.compilers import Compilers, OthersCompilers, start_compilers
from tercet.engine.config import EngineConfig
from tercet.engine.errors import UnsupportedModel
from tercet.engine.log_line import log_line
from tercet.engine.null_runner import NullRunner, NullSwaps
from tercet.engine.planner_settings import check_at_once, num_kept_states
from tercet.engine.start_clock import StartClock
from tercet.engine.step_answers import make_answers
from tercet.engine.step_runner import PageSwaps, StepRunner
from tercet.engine.traced_worker import TracedRunner
from tercet.engine.worker_loop import Copies, run_steps
from tercet.ipc.process_messages import Loaded, Phase, Serving
from tercet.ipc.sockets import Inbox
from tercet.ipc.step_messages import ToWorker
from tercet.model.early_work import fingerprint_triton_early, open_device_early
from tercet.model.quick_sources import quicken_sources

if TYPE_CHECKING:
    import torch

    from tercet.model.adapter_places import AdapterPlaces
    from tercet.model.decoder import Decoder
    from tercet.model.load import Opened
    from tercet.model.parallel import Group

_NULL_BYTES_PER_TOKEN = 1024
"""A null runner has no cache; this sizes the page pool it claims to have."""


class _Made(NamedTuple):
    """`decoder`: the model that the runner runs, if it has one; `swaps`: of pages and states, where there is room for
    them in the host's memory; `places`: for adapters that come and go."""

    runner: StepRunner
    decoder: "Decoder | None" = None
    swaps: PageSwaps | None = None
    places: "AdapterPlaces | None" = None


def main(link: SupervisorLink) -> None:
    rank = link.spec.rank
    own = link.spec.own
    inbox: Inbox[ToWorker] = Inbox(own.workers[rank], ToWorker)
    clock = StartClock()
    runner, decoder, swaps, places = _make_runner(link, clock)
    limits = runner.limits
    if link.spec.config.trace_dir is not None:
        runner = TracedRunner(runner, link.spec)
    link.tell(Loaded(limits, clock.phases))
    link.wait_begin()
    by_itself = limits.device == "cuda" or bool(link.spec.config.null_step_ms)
    answers = make_answers(rank, own.scheduler, by_itself=by_itself)
    copies = None
    if swaps is not None:  # nobody's tokens wait for them
        copies = Copies(swaps, make_answers(rank, own.scheduler, by_itself=by_itself))
    gpu = _gpu_index(link.spec) if limits.device == "cuda" else None
    beside = BesideSteps(link, gpu, decoder, places)
    link.tell(Serving())
    run_steps(inbox, runner, answers, link, beside, copies)


def _make_runner(link: SupervisorLink, clock: StartClock) -> _Made:
    config = link.spec.config
    if config.load_format == "null":
        page_bytes = config.page_size * _NULL_BYTES_PER_TOKEN
        num_pages = (config.kv_cache_memory or 2**30) // page_bytes
        if num_pages < 2:  # as of a model
            raise UnsupportedModel(f"--kv-cache-memory is {config.kv_cache_memory}; want {2 * page_bytes} at least")
        runner = NullRunner(config.max_num_seqs, config.max_model_len, num_pages, config.null_step_ms / 1e3)
        if (size := config.kv_offloading_size) is None:
            return _Made(runner)
        if size < page_bytes:
            raise UnsupportedModel(f"--kv-offloading-size is {size}; want {page_bytes} at least")
        runner.limits = replace(runner.limits, num_host_pages=size // page_bytes, page_bytes=page_bytes)
        return _Made(runner, swaps=NullSwaps())
    try:
        return _load_model(link, clock)
    except ValueError as error:  # what the model and the settings ask for does not go together
        raise UnsupportedModel(str(error)) from error


def _load_model(link: SupervisorLink, clock: StartClock) -> _Made:
    # Before torch reads it: threads that spin for each other stand still, by the millisecond, whenever another process
    # holds a core. On two cores with one half busy that made CPU steps ten times slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ["OMP_DYNAMIC"] = "false"  # with fewer threads than oneDNN has asked for its products are wrong
    quicken_sources()
    spec, config = link.spec, link.spec.config
    if config.device != "cpu":
        open_device_early(_gpu_index(spec))
    # Imported here: a null worker starts without torch.
    import torch

    from tercet.model.host_memory import HostMemory
    from tercet.model.host_places import divide
    from tercet.model.kv_cache import CPU_BYTES, count_pages, make_kv_cache
    from tercet.model.late_compiles import warn_of_late_compiles
    from tercet.model.memory import kv_cache_bytes
    from tercet.model.parallel import Group, set_cpu_threads
    from tercet.model.runner import Runner
    from tercet.model.runner_settings import RunnerSettings
    from tercet.model.states import make_states, num_places, state_tile
    from tercet.model.swaps import Swaps
    from tercet.model.trial_shapes import TrialShapes

    clock.ended("imports")
    link.tell(Phase("imports", 1, 1))
    on_gpu = _takes_gpu(config)
    device = torch.device("cuda", _gpu_index(spec)) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        clock.settle = torch.cuda.synchronize
        fingerprint_triton_early()
    else:
        set_cpu_threads(config.data_parallel_size * config.tensor_parallel_size)
    meeting = f"{spec.own.rendezvous}.{spec.incarnation}"  # a file that none has used before
    group = Group.join(spec.rank, config.tensor_parallel_size, device, meeting, config.startup_timeout)
    clock.ended("device")
    room = HostMemory(config.kv_offloading_size // group.size, device) if config.kv_offloading_size else None
    decoder, cache_dtype, places_for_adapters = _load_decoder(link, clock, group)
    settings = RunnerSettings(
        max_num_seqs=config.max_num_seqs,
        max_model_len=decoder.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        run_ahead=config.run_ahead,
        max_lease=config.max_lease,
        enforce_eager=config.enforce_eager,
        guesses=guess_settings(config),
        most_image_tokens=0 if decoder.vision is None else most_image_tokens(config, spec.paths, decoder.max_model_len),
        timed=config.trace_dir is not None,
    )
    places = num_places(config.max_num_seqs, num_kept_states(config))
    most_tried = 0 if settings.guesses is None else TrialShapes(settings.guesses).max_rows
    states = make_states(decoder.config, places, decoder.dtype, device, group.size, most_tried)
    most = config.max_num_seqs, config.max_num_batched_tokens
    if decoder.vision is not None:
        why = "wants an image's tokens in one step; --limit-mm-per-prompt '{\"image\": 0}' serves text alone"
        check_at_once(*most, decoder.vision.config.at_once, why)
    if states is not None:
        check_at_once(*most, state_tile(decoder.config), "computes prompts in steps of so many")
        link.tell(Phase(f"{places} states, {states.nbytes / 2**20:.0f} MiB", 1, 1))
    if config.kv_cache_memory is not None:
        num_bytes = config.kv_cache_memory
    elif on_gpu:
        num_bytes = kv_cache_bytes(
            decoder, settings, config.page_size, cache_dtype, config.gpu_memory_utilization, states
        )
    else:
        num_bytes = CPU_BYTES
    clock.ended("largest step")
    num_pages = count_pages(decoder.config, num_bytes, config.page_size, cache_dtype, group, decoder.tables)
    sizes = num_pages, config.page_size, cache_dtype, device, group.size
    kv_cache = make_kv_cache(decoder.config, *sizes, decoder.tables)
    cells = str(cache_dtype).removeprefix("torch.")
    many = len(decoder.tables.windows) > 1
    of_layers = f" and {decoder.tables.num_places} layers" if many else ""
    link.tell(Phase(f"{num_pages} pages of {config.page_size} tokens{of_layers} in {cells}", 1, 1))
    clock.ended("cache")
    runner = Runner(decoder, kv_cache, settings, _teller(link, "graphs", clock, "warm-up"), states)
    clock.ended("graphs")
    swaps = None
    if room is not None:
        host = divide(room, kv_cache, states, group)
        swaps = Swaps(kv_cache, host, config.run_ahead, states)
        runner.limits = replace(
            runner.limits,
            num_host_pages=host.num_pages,
            page_bytes=group.size * host.page_bytes,
            num_host_states=host.num_states,
            state_bytes=group.size * host.state_bytes,
        )
        in_words = f"{host.num_pages} pages" + (f" and {host.num_states} states" if host.num_states else "")
        link.tell(Phase(f"{in_words} in the host's memory", 1, 1))
        clock.ended("host memory")
    if on_gpu:
        warn_of_late_compiles()
    return _Made(runner, decoder, swaps, places_for_adapters)


def _load_decoder(
    link: SupervisorLink, clock: StartClock, group: "Group"
) -> "tuple[Decoder, torch.dtype, AdapterPlaces | None]":
    """The model's weights, the type of its cache and the places of its adapters, and on a GPU all kernels, if this is
    the first start that wants them."""
    from tercet.model.load import load_decoder, places_of
    from tercet.model.padded_shapes import Shapes

    config, on_gpu = link.spec.config, group.device.type == "cuda"
    opened = open_configured(config, link.spec.paths, group.device)
    if config.kv_offloading_size and opened.config.carried is not None and not config.kept_states:
        raise ValueError(
            "--kv-offloading-size came with --kept-states 0 and a model whose layers carry states, behind which alone "
            "pages serve; want one of them"
        )
    if config.deterministic and not on_gpu and opened.dtype.itemsize == 2 and group.rank == 0:
        what = f"--deterministic has no effect in {opened.dtype} on the CPU, where sums follow the batch"
        log_line(f"warning: {what}; want --dtype float32")
    if on_gpu and group.rank == 0 and opened.num_expanded:
        which = "docs/architecture.md says which are kept as they are stored"
        log_line(f"tercet: {opened.num_expanded} quantized matrices are expanded to {opened.dtype}; {which}")
    compilers = _start_compilers(link, opened, group.device) if on_gpu and group.rank == 0 else None
    decoder = load_decoder(
        opened,
        group,
        deterministic=config.deterministic,
        guesses=config.speculative_config is not None,
        max_tokens=Shapes(config.max_num_seqs, config.max_num_batched_tokens).max_tokens,
        tables=tables_of(config, opened),
        progress=_teller(link, "bytes of weights", clock, "ranks"),
    )
    clock.ended("weights")
    if compilers is not None:
        compilers.wait(_teller(link, "compilers done", clock, "weights"))
        clock.ended("compilers")
    if on_gpu:
        group.min(0)  # all wait for them: ranks launch the same kernels
    return decoder, opened.cache_dtype, places_of(opened, decoder) if config.max_adapters else None


def _start_compilers(
    link: SupervisorLink, opened: "Opened", device: "torch.device"
) -> Compilers | OthersCompilers | None:
    from tercet.model.compile_ahead import fingerprint, kernel_cache
    from tercet.triton_kernels.dispatch import gpu_of

    config, gpu = link.spec.config, gpu_of(device)
    assert gpu is not None
    spec = CompilerSpec(
        config=config,
        paths=link.spec.paths,
        gpu=gpu.name,
        capability=gpu.capability,
        multiprocessors=gpu.multiprocessors,
    )
    return start_compilers(spec, kernel_cache(), fingerprint(steps_of(config, link.spec.paths, opened), gpu))


def _teller(link: SupervisorLink, what: str, clock: StartClock, before: str) -> Callable[[int, int], None]:
    """Tells the supervisor how much of a phase is done; the phase `before` ends where this one begins."""

    def tell(done: int, total: int) -> None:
        if not done:
            clock.ended(before)
        link.tell(Phase(what, done, total))

    return tell


def _takes_gpu(config: EngineConfig) -> bool:
    """Whether ranks run on GPUs; ValueError if they are wanted and not there."""
    import torch

    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    if config.device == "cuda" and not on_gpu:
        raise ValueError("--device cuda, but torch finds no CUDA device")
    needed = config.data_parallel_size * config.tensor_parallel_size
    if on_gpu and torch.cuda.device_count() < needed:
        asked = f"--tensor-parallel-size {config.tensor_parallel_size}"
        if config.data_parallel_size > 1:
            asked = f"--data-parallel-size {config.data_parallel_size} with {asked} takes {needed}"
        raise ValueError(f"{asked}, but there are {torch.cuda.device_count()} GPUs")
    return on_gpu


def _gpu_index(spec: child.ChildSpec) -> int:
    """Each replica has as many GPUs, side by side, as it has ranks."""
    return spec.replica * spec.config.tensor_parallel_size + spec.rank


if __name__ == "__main__":
    child.run(main)
