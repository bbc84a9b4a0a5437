"""What ``bench`` looks at inside vLLM's worker processes. Reached through ``collective_rpc``, by reference.

The timed runs see one thing of it: a note per step of how many requests it had. Everything that costs time
(build timers, the torch profiler) runs in windows of their own, armed for one more generation after all
timing. All windows are of *decode* steps: every request of the batch verifies or decodes, none prefills.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Name of the range that marks the drafter's work in a trace.
DRAFT = "specpatch.draft"
#: Decode steps that are let pass before the first window: the drafter's first tokens, a draining prefill.
SKIP = 3
#: (window, decode steps). The second profiler run also records host ranges, which slows the host, so the
#: GPU's idle share comes from the first.
WINDOWS = (("builds", 10), ("gpu", 12), ("draft", 6))


def steps_needed() -> int:
    """Decode steps that one generation must have for all windows."""
    return SKIP + sum(steps for _, steps in WINDOWS) + len(WINDOWS) + 1


def runner_of(worker: Any) -> Any:
    return getattr(worker, "worker", worker).model_runner


def _probe(worker: Any) -> Probe:
    runner = runner_of(worker)
    probe: Probe | None = getattr(runner, "specpatch_probe", None)
    if probe is None:
        probe = runner.specpatch_probe = Probe(runner)
    return probe


# -- called through collective_rpc: the first argument is the worker -------------------------------


def describe(worker: Any) -> dict[str, Any]:
    """How this rank ended up: attention backends, captured graphs, the package's own status."""
    import torch

    import vllm_specpatch

    runner = runner_of(worker)
    version = 2 if ".worker.gpu." in type(runner).__module__ else 1
    return {
        "gpu": torch.cuda.get_device_name(),
        "runner": version,
        "backends": sorted({kind.__module__.rpartition(".")[2] for kind in builder_types(runner)}),
        "graphs": captured_graphs(runner),
        "status": vllm_specpatch.status(),
    }


def watch(worker: Any, k: int) -> None:
    """Starts to note steps; ``k`` draft tokens per step."""
    _probe(worker).watch(k)


def take_steps(worker: Any) -> list[list[int]]:
    """``[decoding requests, 1 if nothing else ran, how many of them had drafts]`` per step since the last
    call."""
    probe = _probe(worker)
    steps, probe.steps = probe.steps, []
    return steps


def arm(worker: Any, requests: int) -> None:
    """Opens the windows in the next decode steps of exactly ``requests`` requests."""
    _probe(worker).arm(requests)


def take_windows(worker: Any) -> dict[str, Any]:
    """What the windows saw; a window that did not come to its end is absent. Ends what still runs."""
    return _probe(worker).finish()


# -- the scheduler, in the process of the engine's core ---------------------------------------------


class Drafts:
    """vLLM's own verdict on drafts, per request and step, before a generation is cut at its last token."""

    def __init__(self, scheduler: Any) -> None:
        self._found = [0, 0, 0]
        make = scheduler.make_spec_decoding_stats

        # Called for each request that verified, also where no statistics are kept.
        def counted(*args: Any, **kwargs: Any) -> Any:
            verified, proposed, accepted = self._found
            self._found = [
                verified + 1,
                proposed + kwargs["num_draft_tokens"],
                accepted + kwargs["num_accepted_tokens"],
            ]
            return make(*args, **kwargs)

        scheduler.make_spec_decoding_stats = counted

    def take(self) -> list[int]:
        """``[verifications, proposed tokens, accepted tokens]`` since the last call."""
        found, self._found = self._found, [0, 0, 0]
        return found


def watch_drafts(llm: Any) -> Drafts | None:
    """None if the engine's core is not in this process, or laid out in a way that is not known."""
    core = getattr(getattr(llm.llm_engine, "engine_core", None), "engine_core", None)
    scheduler = getattr(core, "scheduler", None)
    return Drafts(scheduler) if hasattr(scheduler, "make_spec_decoding_stats") else None


# -- the runner ------------------------------------------------------------------------------------


def captured_graphs(runner: Any) -> dict[str, int]:
    """How many CUDA graphs the runner holds, from its own objects; empty for a layout that is not known."""
    found: dict[str, int] = {}
    for owner, prefix in ((runner, "target"), (getattr(runner, "speculator", None), "draft")):
        for name, value in vars(owner).items() if owner is not None else ():
            if name.endswith("cudagraph_manager") and hasattr(value, "graphs"):
                kind = name.removesuffix("cudagraph_manager").strip("_")
                found[f"{prefix}_{kind}" if kind else prefix] = len(value.graphs)
    dispatcher = getattr(runner, "cudagraph_dispatcher", None)
    if (
        not found and dispatcher is not None
    ):  # the V1 runner keeps graphs in wrappers; it counts keys per mode
        found = {f"v1_{mode.name}": len(keys) for mode, keys in dispatcher.cudagraph_keys.items()}
    return found


def builder_types(runner: Any) -> set[type]:
    """Classes of the attention metadata builders that the runner and its drafter use.

    From their ``*attn_groups``, nested lists of objects with ``metadata_builders``. (Not from the garbage
    collector: vLLM freezes it after start-up, and frozen objects are not listed.)
    """
    found: set[type] = set()

    def look(groups: Any) -> None:
        if isinstance(groups, (list, tuple)):
            for group in groups:
                look(group)
        else:
            found.update(type(builder) for builder in getattr(groups, "metadata_builders", ()))

    for owner in (runner, drafter_of(runner)):
        for name, value in vars(owner).items() if owner is not None else ():
            if name.endswith("attn_groups"):
                look(value)
    return found


def drafter_of(runner: Any) -> Any:
    """What proposes drafts: the V2 runner's speculator, the V1 runner's drafter, None without speculation."""
    return getattr(runner, "speculator", None) or getattr(runner, "drafter", None)


class BuildTimer:
    """Host time in ``build()`` of all metadata builders, waiting for the GPU included, while installed."""

    def __init__(self) -> None:
        self.calls, self.seconds = 0, 0.0
        self._depth = 0
        self._wrapped: list[tuple[type, Any]] = []

    def install(self, kinds: Iterable[type]) -> None:
        owners = {next(base for base in kind.__mro__ if "build" in vars(base)) for kind in kinds}
        for owner in owners:
            original = vars(owner)["build"]
            self._wrapped.append((owner, original))
            setattr(owner, "build", self._timed(original))  # noqa: B010

    def remove(self) -> None:
        for owner, original in self._wrapped:
            setattr(owner, "build", original)  # noqa: B010
        self._wrapped = []

    def _timed(self, original: Any) -> Any:
        timer = self

        def build(builder: Any, *args: Any, **kwargs: Any) -> Any:
            # A builder may call its base class or another builder: only the outermost call counts.
            bound = original.__get__(builder, type(builder))
            if timer._depth:
                return bound(*args, **kwargs)
            timer._depth += 1
            started = time.perf_counter()
            try:
                return bound(*args, **kwargs)
            finally:
                timer.seconds += time.perf_counter() - started
                timer.calls += 1
                timer._depth -= 1

        return build


class Probe:
    """One per model runner."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.steps: list[list[int]] = []
        self._k = 0
        self._watching = False
        self._requests = 0
        self._todo: list[tuple[str, int]] = []
        self._skip = 0
        self._window: tuple[str, int] | None = None
        self._left = 0
        self._tool: Any = None
        self._found: dict[str, Any] = {}

    def watch(self, k: int) -> None:
        self._k = k
        if self._watching:
            return
        self._watching = True
        execute = self.runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.before(scheduler_output)
            return execute(scheduler_output, *args, **kwargs)

        self.runner.execute_model = execute_model

    def before(self, scheduler_output: Any) -> None:
        """Called before each step with vLLM's ``SchedulerOutput``."""
        scheduled = scheduler_output.num_scheduled_tokens
        if not scheduled:
            return
        # The last piece of a prompt may be as short as a decode.
        cached = scheduler_output.scheduled_cached_reqs
        prefill = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        prefill.update(name for name, said in zip(cached.req_ids, cached.num_output_tokens) if not said)
        names = [name for name, n in scheduled.items() if n <= 1 + self._k and name not in prefill]
        drafted = sum(name in scheduler_output.scheduled_spec_decode_tokens for name in names)
        decoding = len(names)
        pure = decoding == len(scheduled)
        self.steps.append([decoding, int(pure), drafted])
        if self._todo or self._window:
            try:
                self._advance(pure and decoding == self._requests)
            except Exception as e:  # the profiler is a guest: a timed server must not die of it
                self._found["error"] = f"{type(e).__name__}: {e}"
                self._todo, self._window = [], None

    def arm(self, requests: int) -> None:
        self._requests, self._todo, self._skip = requests, list(WINDOWS), SKIP
        self._window, self._found = None, {}

    def finish(self) -> dict[str, Any]:
        if self._window:
            self._close()  # cut short by the end of the generation: judged by the steps it had
        self._todo = []
        return self._found

    def _advance(self, wanted: bool) -> None:
        if self._window:
            if wanted and self._left:
                self._left -= 1
                return
            self._close()
        if not wanted or not self._todo:
            return
        if self._skip:
            self._skip -= 1
            return
        name, steps = self._todo.pop(0)
        self._window, self._left = (name, steps), steps - 1
        self._open(name)

    # -- windows -------------------------------------------------------------------------------------

    def _open(self, name: str) -> None:
        import torch

        torch.cuda.synchronize()
        if name == "builds":
            self._tool = BuildTimer()
            self._tool.install(builder_types(self.runner))
            return
        from torch.profiler import profile

        if name == "draft":
            self._mark_drafter()
        self._tool = profile(activities=activities(host=name == "draft"))
        self._tool.__enter__()

    def _close(self) -> None:
        import torch

        assert self._window is not None
        (name, steps), self._window = self._window, None
        steps -= self._left
        torch.cuda.synchronize()
        if name == "builds":
            self._tool.remove()
            self._found[name] = {"steps": steps, "calls": self._tool.calls, "seconds": self._tool.seconds}
            return
        self._tool.__exit__(None, None, None)
        events = trace_events(self._tool)
        if name == "draft":
            self._unmark_drafter()
            self._found[name] = {"steps": steps, **draft_launches(events)}
        else:
            self._found[name] = {"steps": steps, **gpu_time(events)}

    def _mark_drafter(self) -> None:
        from torch.profiler import record_function

        drafter = drafter_of(self.runner)
        if drafter is None:
            return
        propose = drafter.propose

        def marked(*args: Any, **kwargs: Any) -> Any:
            with record_function(DRAFT):
                return propose(*args, **kwargs)

        drafter.propose = marked

    def _unmark_drafter(self) -> None:
        drafter = drafter_of(self.runner)
        if drafter is not None:
            vars(drafter).pop("propose", None)


def activities(host: bool) -> list[Any]:
    from torch.profiler import ProfilerActivity

    return [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if host else [])]


# -- traces ------------------------------------------------------------------------------------------


def trace_events(profiler: Any) -> list[dict[str, Any]]:
    """The complete events of a finished torch profiler, from its Chrome trace: the format that stays."""
    with tempfile.TemporaryDirectory(prefix="specpatch-") as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as trace:
            return [event for event in json.load(trace)["traceEvents"] if event.get("ph") == "X"]


ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def gpu_time(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """``span_us``: from the first to the last GPU event; ``busy_us``: the union of all, streams together."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in ON_GPU)
    if not spans:
        return {"span_us": 0.0, "busy_us": 0.0}
    busy, (begin, end) = 0.0, spans[0]
    for start, stop in spans[1:]:
        if start > end:
            busy += end - begin
            begin, end = start, stop
        else:
            end = max(end, stop)
    return {"span_us": max(stop for _, stop in spans) - spans[0][0], "busy_us": busy + end - begin}


def draft_launches(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What the drafter started, from the host ranges named :data:`DRAFT`.

    ``proposals``: ranges; ``graph_launches`` and ``kernel_launches``: runtime calls in them;
    ``graph_kernels`` and ``eager_kernels``: the GPU kernels those calls ran, told apart by their correlation.
    """
    ranges = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("name") == DRAFT and e.get("cat") == "user_annotation"
    ]
    by_graph: set[Any] = set()
    by_kernel: set[Any] = set()
    for event in events:
        if event.get("cat") not in ("cuda_runtime", "cuda_driver") or "Launch" not in event["name"]:
            continue
        if any(begin <= event["ts"] <= end for begin, end in ranges):
            correlation = event.get("args", {}).get("correlation")
            (by_graph if "GraphLaunch" in event["name"] else by_kernel).add(correlation)
    kernels = [e.get("args", {}).get("correlation") for e in events if e.get("cat") == "kernel"]
    return {
        "proposals": len(ranges),
        "graph_launches": len(by_graph),
        "kernel_launches": len(by_kernel),
        "graph_kernels": sum(c in by_graph for c in kernels),
        "eager_kernels": sum(c in by_kernel for c in kernels),
    }
