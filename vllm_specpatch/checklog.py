"""``vllm-specpatch check-log``: what a vLLM server log says about CUDA graphs and speculative decoding.

Four steps, each pure after the first: bytes -> physical lines (gzip, docker and CRI wrappers undone) ->
records (one message of one process) -> engines (facts) -> verdicts. The messages are those that vLLM 0.24 to
0.33 print; they are matched inside a line, so other log formats in front of them do no harm.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import re
import sys
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import IO, Any

from .exit_codes import CANNOT_TELL, GOOD, WRONG

VERDICTS = {GOOD: "good", WRONG: "WRONG", CANNOT_TELL: "cannot tell"}
WIDTH = 110
LABEL = 20
#: Longest piece of a line that is looked at; a log without newlines must not be read into memory at once.
MAX_LINE = 1 << 20
#: vLLM's longest message, its configuration, has 6 KB.
MAX_MESSAGE = 1 << 16


class LogUnreadable(RuntimeError):
    """The file cannot be read; the text is one line for the user."""


# -- bytes to physical lines ---------------------------------------------------------------------

ANSI = re.compile(r"(?:\x1b|\^\[|#033)(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
#: Container runtimes put a time stamp in front, and CRI also the stream and whether the line goes on.
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)[ \t](?=\S)")
CRI = re.compile(r"(stdout|stderr) ([FP]) ?")
COMPOSE = re.compile(r"([A-Za-z0-9][\w.-]*) +\| ?")
POD = re.compile(r"\[pod/([^\]\s]+)\] ")


@dataclass(frozen=True)
class Line:
    """A physical line; ``source`` is the container or pod that wrote it ("" if the log names none)."""

    source: str
    text: str


def physical_lines(stream: IO[bytes]) -> Iterator[Line]:
    """Lines of a log, container wrappers removed. Never raises on content; I/O errors pass through."""
    pending: dict[tuple[str, str], str] = {}  # (source, stream) -> a line that a runtime cut in pieces

    def joined(source: str, channel: str, text: str, ends: bool) -> Iterator[Line]:
        text = pending.pop((source, channel), "") + text
        if ends or len(text) > MAX_LINE:
            for part in text.split("\n"):
                yield Line(source, part)
        else:
            pending[source, channel] = text

    while raw := stream.readline(MAX_LINE):
        text = (
            raw.decode("utf-8", "replace").rstrip("\r\n")
            if raw.endswith(b"\n")
            else raw.decode("utf-8", "replace")
        )
        source = ""
        if match := COMPOSE.match(ANSI.sub("", text[:200])):
            source, text = match[1], ANSI.sub("", text)[match.end() :]
        elif match := POD.match(text):
            source, text = match[1], text[match.end() :]
        if match := STAMP.match(text):
            text = text[match.end() :]
            if match := CRI.match(text):
                yield from joined(source, match[1], text[match.end() :], match[2] == "F")
                continue
        if text.startswith("{") and isinstance(entry := _json_object(text), dict):
            inner = entry.get("log")
            if isinstance(inner, str):
                source = source or str(entry.get("container_name") or "")
                yield from joined(source, str(entry.get("stream")), inner.rstrip("\n"), inner.endswith("\n"))
                continue
        yield Line(source, text)
    for (source, _), text in pending.items():
        for part in text.split("\n"):
            yield Line(source, part)


def _json_object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# -- physical lines to records -------------------------------------------------------------------

PROCESS = r"\((?P<process>[A-Za-z][\w.:-]*) (?:rank=\d+ )?pid=(?P<pid>\d+)(?:, ip=[^)\s]*)?\)[ \t]*"
LEVEL = r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? (?:\[[^\]\s]*\] ?)?"
MARK = re.compile(f"{PROCESS}|{LEVEL}")
MESSAGE_KEYS = ("message", "msg", "event", "MESSAGE", "text", "body")
PROCESS_KEYS = ("vllm_process_name", "processName", "process_name")
BAR = re.compile(
    r"Capturing (?P<what>[\w -]*?)CUDA graphs(?: \((?P<mode>[^)]*)\))?:"
    r"\s+\d+%\|[^|]*\|\s*(?P<done>\d+)/(?P<all>\d+)"
)
#: Words of every message that matters here; everything else in a log of gigabytes is dropped early.
RELEVANT = re.compile(
    r"CUDAGraphMode\.|Capturing |backend|vllm-specpatch|Initializing a V1|Model Runner|drafter|to load model"
    r"|draft attention|udagraph mode|Graph capturing|CUDA graph|VLLM_SPECPATCH|artifactory"
    r"|Error: CUDA |EngineCore (?:encountered|failed)"
)


@dataclass(frozen=True)
class Record:
    """One message (or one state of a progress bar) of one process."""

    source: str
    process: str  # "EngineCore_DP0", "Worker_TP1", ...; "" where the log names none
    pid: str
    text: str


def records(lines: Iterable[Line]) -> Iterator[Record]:
    """Relevant messages with the process that wrote them. Never raises.

    vLLM writes a process prefix at the start of a line only, while a progress bar goes on after a carriage
    return, or on a new line when another process wrote in between. A bar therefore belongs to the process
    that started it.
    """
    bars: dict[tuple[str, str], tuple[str, str]] = {}
    for line in lines:
        text = ANSI.sub("", line.text)
        process, pid = "", ""
        if "{" in text:
            process, pid, text = _unwrap_json(text)
        if not RELEVANT.search(text):
            continue
        engine = process
        for segment in re.split(r"[\r\n]+", text):
            start, last_was_prefix = 0, False
            for mark in MARK.finditer(segment):
                before = segment[start : mark.start()]
                if before.strip():
                    yield from _record(line.source, engine, pid, before, bars)
                    last_was_prefix = False
                start = mark.end()
                if mark["process"]:
                    # Ray puts its own prefix around or behind that of the engine: the one with the
                    # data-parallel rank names the engine, the inner one the process.
                    nested = last_was_prefix and engine_of(engine) and not engine_of(mark["process"])
                    engine = engine if nested else mark["process"]
                    pid, last_was_prefix = mark["pid"], True
            if segment[start:].strip():
                yield from _record(line.source, engine, pid, segment[start:], bars)


def _record(
    source: str, process: str, pid: str, text: str, bars: dict[tuple[str, str], tuple[str, str]]
) -> Iterator[Record]:
    bar = BAR.search(text)
    if bar is not None:
        name = (source, f"{bar['what']}({bar['mode']})")
        if process:
            bars[name] = (process, pid)
        else:
            process, pid = bars.get(name, ("", ""))
    if RELEVANT.search(text):
        yield Record(source, process, pid, text.strip()[:MAX_MESSAGE])


def _unwrap_json(text: str) -> tuple[str, str, str]:
    """(process, pid, message) of a JSON-formatted log line; ("", "", text) where it is none."""
    head, brace, body = text.partition("{")
    if head.strip() and not re.fullmatch(PROCESS, head.strip()):
        return "", "", text
    entry = _json_object((brace + body).strip())
    message = (
        next((entry[k] for k in MESSAGE_KEYS if isinstance(entry.get(k), str)), None)
        if isinstance(entry, dict)
        else None
    )
    if message is None:
        return "", "", text
    if (prefix := re.fullmatch(PROCESS, head.strip())) is not None:
        return prefix["process"], prefix["pid"], message
    name = next((entry[k] for k in PROCESS_KEYS if isinstance(entry.get(k), str)), "")
    return ("" if name == "MainProcess" else name), str(entry.get("process", "")), message


# -- records to engines --------------------------------------------------------------------------

# Not behind a quote: a benchmark's own output, or a traceback, may quote vLLM's messages.
NOT_QUOTED = r"(?<![\w\"'`])"
INIT = re.compile(
    NOT_QUOTED + r"Initializing a V1 LLM engine \(v(?P<version>[^)]+)\) with config: (?P<config>.*)"
)
SPECULATION = re.compile(
    r"speculative_config=(?:None|SpeculativeConfig\(method='(?P<method>[^']*)'(?P<rest>[^)]*))"
)
DOWNGRADE = re.compile(
    NOT_QUOTED + r"CUDAGraphMode\.(?P<asked>\w+) is not supported.*?"
    r"(?:for attention backend (?P<b1>\w+)|with (?P<b2>\w+) backend) \(support: ?(?:AttentionCGSupport\.)?"
    r"(?P<support>\w+)\).*?setting cudagraph_mode=(?P<to>\w+)"
)
# A whole name with something behind it: the last line of a log that is still growing may end in "FULL".
MODE_ASKED = re.compile(
    r"'?cudagraph_mode'?[:=] ?<?(?:CUDAGraphMode\.)?'?"
    r"(NONE|PIECEWISE|FULL|FULL_DECODE_ONLY|FULL_AND_PIECEWISE)(?=\W)"
)
NO_PIECEWISE = re.compile(
    NOT_QUOTED + r"Cudagraph mode (?:CUDAGraphMode\.)?(?P<asked>\w+) requires piecewise capture.*"
    r"Overriding to (?:CUDAGraphMode\.)?(?P<to>\w+)"
)
BACKEND = re.compile(
    NOT_QUOTED + r"Using (?:AttentionBackendEnum\.)?(?P<name>[A-Z][A-Z0-9_]*) (?:attention )?"
    r"backend(?:\.| out of potential backends)"
)
DECODE_BACKEND = re.compile(
    r"FlashInfer resolved query dtypes: .*decode_backend=(?P<decode>[^,\s]+), "
    r"kv_cache_dtype=(?:torch\.)?(?P<kv>[^,\s]+), arch=(?P<arch>\w+)"
)
SPECULATOR = re.compile(r"Capturing model for (?P<name>.*?) ?speculator\.\.\.")
DRAFT_EAGER = re.compile(
    r"(?P<name>\S+) draft attention \((?P<backend>[^)]*)\) does not support full CUDA graphs; "
    r"running the draft eagerly"
)
FINISHED = re.compile(r"Graph capturing finished in (?P<secs>\d+) secs, took (?P<gib>-?\d+(?:\.\d+)?) GiB")
#: How an engine ends that did not mean to: the line of its exception, or vLLM's own.
DIED = re.compile(
    r"(?:AcceleratorError|RuntimeError|OutOfMemoryError): (?P<cuda>CUDA (?:error: .{1,100}|out of memory))"
    r"|(?P<fatal>EngineCore encountered a fatal error|EngineCore failed to start)"
)
OURS = re.compile(NOT_QUOTED + r"(?<!-)vllm-specpatch (?P<version>\d[\w.+]*): (?P<text>.*)")
OUR_STATE = re.compile(
    r"not applied \((?P<no>[a-z ]+)\)|\S+ (?P<yes>applied|waiting|not needed|disabled|refused|late|failed): "
)
#: vLLM warns of every VLLM_ variable that it does not know.
SETTING = "environment variable detected: VLLM_SPECPATCH"
#: Methods that draft without a model, so that there is nothing to capture.
NO_DRAFT_MODEL = ("ngram", "ngram_gpu", "suffix", "extract_hidden_states")
FULL_MODES = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
TROUBLE = ("refused", "late", "failed", "defect")


@dataclass
class Engine:
    """Facts about the last start of one engine (a data-parallel rank, or the only one)."""

    name: str
    source: str = ""
    starts: int = 0
    version: str | None = None
    runner: str | None = None  # "V1" or "V2"
    method: str | None = None  # None: not known; "": no speculative decoding
    k: int | None = None
    kv_cache_dtype: str | None = None
    arch: str | None = None
    backend: str | None = None
    decode_backend: str | None = None
    drafter_backend: str | None = None
    requested: str | None = None
    resolved: str | None = None
    support: str | None = None  # the support level that the downgrade warning names
    downgrade: str | None = None  # the warning as printed
    eager: bool = False  # enforce_eager
    target_graphs: dict[str, list[int]] = field(default_factory=dict)  # mode -> [captured, all]
    drafter_graphs: dict[str, list[int]] = field(default_factory=dict)
    drafter: str = "unknown"
    graph_gib: float | None = None
    captured: bool = False  # "Graph capturing finished"
    died: str | None = None  # the error that ended it
    ours: list[str] = field(default_factory=list)
    our_state: str | None = None
    notes: list[str] = field(default_factory=list)
    verdict: int = CANNOT_TELL
    reason: str = ""
    next_step: str = ""

    # Who said what, to find ranks that disagree; and order, to tell the target's lines from the drafter's.
    warned: set[str] = field(default_factory=set, repr=False)
    applied: set[str] = field(default_factory=set, repr=False)
    loading_drafter: bool = field(default=False, repr=False)
    draft_eager: str = field(default="", repr=False)
    speculator: bool = field(default=False, repr=False)

    def facts(self) -> dict[str, Any]:
        """Plain data, without what only the parser needs."""
        facts = asdict(self)
        for name in ("warned", "applied", "loading_drafter", "draft_eager", "speculator"):
            del facts[name]
        return {**facts, "verdict": VERDICTS[self.verdict].lower()}


def engine_of(process: str) -> str:
    """ "DP0" from "EngineCore_DP0", "Worker_DP0_TP1" or the older "EngineCore_0"; "" where none is named."""
    match = re.search(r"_DP(\d+)(?![0-9])", process) or re.fullmatch(r"EngineCore_(\d+)", process)
    return f"DP{int(match[1])}" if match and len(match[1]) < 6 else ""


def engines(found: Iterable[Record]) -> list[Engine]:
    """The engines of a log, judged, by container and data-parallel rank. Never raises."""
    by_source: dict[str, list[tuple[str, Record]]] = {}
    for record in found:
        by_source.setdefault(record.source, []).append((engine_of(record.process), record))
    result = []
    for source, tagged in sorted(by_source.items()):
        ranks = sorted({rank for rank, _ in tagged if rank}, key=lambda rank: int(rank[2:]))
        if len(ranks) < 2:
            # One engine only: what its front end, its workers and Ray's wrappers say is about it.
            result.append(_fold(ranks[0] if ranks else "engine", source, [record for _, record in tagged]))
            continue
        some = [_fold(name, source, [record for rank, record in tagged if rank == name]) for name in ranks]
        if any(not rank and BAR.search(record.text) for rank, record in tagged):
            # From 0.31 the prefix is part of the log format, which progress bars do not use.
            for engine in some:
                if not engine.target_graphs:
                    _note(engine, "this log has progress bars that do not name their engine")
        result += some
    result = [engine for engine in result if engine != Engine(engine.name, engine.source)]
    for engine in result:
        _conclude(engine)
    return result


def _fold(name: str, source: str, found: Sequence[Record]) -> Engine:
    engine = Engine(name, source)
    early: list[Record] = []  # what was said before the engine of its start was announced
    for record in found:
        text = record.text
        if match := INIT.search(text):
            engine = Engine(name, source, starts=engine.starts + 1)  # a restart: the last start counts
            _read_config(engine, match["version"], match["config"])
            for earlier in early:
                _read_setting(engine, earlier)
            early = []
        elif match := BAR.search(text):
            _read_bar(engine, match)
        elif OURS.search(text) or SETTING in text:
            _read_setting(engine, record)
            early.append(record)
        elif match := DOWNGRADE.search(text):
            engine.requested = engine.requested or match["asked"]
            engine.resolved, engine.support = match["to"], match["support"]
            engine.downgrade = text
            engine.warned.add(record.pid)
            if "spec-decode" in text and engine.method is None:
                engine.method = "?"
        elif match := NO_PIECEWISE.search(text):
            engine.resolved, engine.downgrade = match["to"], text
        elif match := BACKEND.search(text):
            if engine.loading_drafter:
                engine.drafter_backend = match["name"]
            else:
                engine.backend = engine.backend or match["name"]
        elif match := DECODE_BACKEND.search(text):
            engine.decode_backend = engine.decode_backend or match["decode"]
            engine.arch = match["arch"]
        elif match := DRAFT_EAGER.search(text):
            engine.draft_eager = f"{match['name']} on {match['backend']}"
        elif match := SPECULATOR.search(text):
            engine.speculator, engine.runner = True, "V2"
        elif match := FINISHED.search(text):
            engine.captured, engine.graph_gib = True, float(match["gib"])
            early = []
        elif "Using V2 Model Runner" in text:
            engine.runner = "V2"
        elif "Loading drafter model" in text:
            engine.loading_drafter, engine.runner = True, "V1"
        elif "Starting to load model" in text:
            engine.runner = engine.runner or "V1"
        elif "Skipping CUDA graph capture" in text:
            engine.resolved = "NONE"
        elif match := DIED.search(text):
            # The first: what follows is about the others that noticed.
            engine.died = engine.died or match["cuda"] or match["fatal"]
        elif "Failed to connect to NVIDIA artifactory" in text:
            _note(engine, "NVIDIA's cubin host could not be reached: no trtllm-gen and no XQA kernels")
    return engine


def _note(engine: Engine, text: str) -> None:
    if text not in engine.notes:
        engine.notes.append(text)


def _read_config(engine: Engine, version: str, config: str) -> None:
    engine.version = version
    if match := SPECULATION.search(config):
        engine.method = match["method"] or ""
        if k := re.search(r"num_spec_tokens=(\d{1,4})\b", match["rest"] or ""):
            engine.k = int(k[1])
    if match := re.search(r"\bkv_cache_dtype=([\w.]+)", config):
        engine.kv_cache_dtype = match[1].removeprefix("torch.")
    if match := MODE_ASKED.search(config):
        engine.requested = match[1]
    engine.eager = "enforce_eager=True" in config


def _read_bar(engine: Engine, bar: re.Match[str]) -> None:
    what, mode = bar["what"].strip(), bar["mode"] or ""
    if what == "encoder":
        return
    if what == "" and ", " in mode:
        engine.runner, mode = "V1", mode.rpartition(", ")[2]
    key = mode if what == "" else f"{what} {mode}".strip()
    graphs = engine.target_graphs if what == "" else engine.drafter_graphs
    done, total = int(bar["done"][:6]), int(bar["all"][:6])
    known = graphs.setdefault(key, [0, total])
    graphs[key] = [max(known[0], done), max(known[1], total)]


def _read_setting(engine: Engine, record: Record) -> None:
    match = OURS.search(record.text)
    if match is None:
        _note(engine, "a VLLM_SPECPATCH variable was set (vLLM calls it unknown; harmless)")
        return
    if match["text"] not in engine.ours:
        engine.ours.append(match["text"])
    state = OUR_STATE.match(match["text"])
    said = (state["no"] or state["yes"]) if state else ("defect" if "defect" in match["text"] else None)
    if said == "applied":
        engine.applied.add(record.pid)
    stronger = engine.our_state is None or said in (*TROUBLE, "applied")
    if said is not None and engine.our_state not in TROUBLE and stronger:
        # "applied" for one configuration and "not needed" for another: the stronger one is shown.
        engine.our_state = said


# -- verdicts ------------------------------------------------------------------------------------


def _complete(graphs: dict[str, list[int]], mode: str) -> bool:
    return any(key.endswith(mode) and 0 < n == total for key, (n, total) in graphs.items())


def _drafter(engine: Engine) -> str:
    """How the drafter runs: none, full, piecewise, first step, eager or unknown."""
    if engine.method == "" or engine.method in NO_DRAFT_MODEL:
        return "none"
    if engine.draft_eager or engine.eager or engine.resolved == "NONE":
        return "eager"
    graphs = engine.drafter_graphs
    if engine.runner == "V1":
        if engine.resolved in (None, "FULL_DECODE_ONLY"):
            return "unknown" if engine.resolved is None else "eager"
        return "piecewise"
    # "prefill" graphs run the first draft step, "decode" graphs all others; dflash has one pass only.
    later = {key: n for key, n in graphs.items() if not key.startswith("prefill")}
    if _complete(later, "FULL") or (engine.k == 1 and _complete(graphs, "FULL")):
        return "full"
    if any(n < all_ for n, all_ in graphs.values()):
        return "unknown"
    if graphs:
        return "piecewise" if later or engine.k == 1 else "first step"
    if engine.speculator and engine.captured and engine.target_graphs and not graphs:
        return "eager"
    return "unknown"


DRAFTER_TEXT = {
    "none": "no draft model",
    "full": "FULL graphs",
    "piecewise": "PIECEWISE graphs",
    "first step": "first step from graphs, later steps eager",
    "eager": "eager",
    "unknown": "not known",
}


def _conclude(engine: Engine) -> None:
    if engine.resolved is None and engine.requested is not None and not engine.eager:
        engine.resolved = engine.requested  # vLLM says nothing when it keeps the mode
    if engine.eager:
        engine.resolved = "NONE"
    if engine.resolved is None and engine.target_graphs:
        seen = [mode for mode in ("FULL", "PIECEWISE") if mode in engine.target_graphs]
        engine.resolved = "_AND_".join(seen) or None
    if engine.method is None and (engine.drafter_graphs or engine.speculator or engine.loading_drafter):
        engine.method = "?"
    engine.drafter = _drafter(engine)
    engine.verdict, engine.reason, engine.next_step = _judge(engine)
    if engine.starts > 1:
        _note(engine, f"the log has {engine.starts} starts of this engine; the last one is shown")


def _judge(engine: Engine) -> tuple[int, str, str]:
    wanted_full = engine.requested is None or engine.requested in FULL_MODES
    if engine.died:
        ours = engine.our_state == "applied"
        remedy = "does it end the same way with VLLM_SPECPATCH=0? If not, report this log" if ours else ""
        return WRONG, f"the engine died: {engine.died}", remedy or "see the traceback in this log"
    if engine.warned and engine.applied - engine.warned:
        return (
            WRONG,
            f"its processes disagree: {len(engine.applied)} patched, {len(engine.warned)} downgraded",
            "install vllm-specpatch for every worker (all nodes, the same image) and start again",
        )
    if engine.eager or engine.requested == "NONE":
        return GOOD, "CUDA graphs are off, as configured", ""
    if engine.resolved is None:
        return (
            CANNOT_TELL,
            "no line about CUDA graphs in this log",
            "give the log of the whole start, with INFO lines (VLLM_LOGGING_LEVEL=INFO)",
        )
    if engine.method == "":
        return GOOD, f"no speculative decoding; cudagraph_mode {engine.resolved}", ""
    if wanted_full and engine.resolved not in FULL_MODES:
        who = engine.backend or "the backend"
        why = f"{who} supports {engine.support} only" if engine.support else "see the downgrade warning"
        return WRONG, f"FULL CUDA graphs were lost, {engine.resolved} is left: {why}", _remedy(engine)
    if not wanted_full:
        return GOOD, f"cudagraph_mode {engine.resolved}, as configured (no FULL graphs were asked for)", ""
    unfinished = [k for k, (n, all_) in {**engine.target_graphs, **engine.drafter_graphs}.items() if n < all_]
    if not engine.captured and (engine.starts or unfinished or not engine.target_graphs):
        where = "during" if engine.target_graphs else "before"
        return CANNOT_TELL, f"the log ends {where} graph capture", "try again when the server is ready"
    if engine.drafter in ("eager", "first step"):
        what = "its later steps" if engine.drafter == "first step" else "all its steps"
        why = f" ({engine.draft_eager})" if engine.draft_eager else ""
        return WRONG, f"the drafter runs {what} eagerly{why}", _remedy(engine)
    if not engine.target_graphs:
        return GOOD, f"cudagraph_mode {engine.resolved} was kept (no progress bars here to confirm it)", ""
    if not _complete(engine.target_graphs, "FULL"):
        return WRONG, "cudagraph_mode has FULL graphs, and none were captured for the target", _remedy(engine)
    if engine.drafter == "piecewise" and engine.runner == "V1":
        note = "V1 runner: on every backend"
        return GOOD, f"FULL graphs for the target, PIECEWISE for the drafter ({note})", ""
    who = "the target" if engine.drafter in ("none", "unknown") else "target and drafter"
    return GOOD, f"FULL CUDA graphs for {who}", ""


def _remedy(engine: Engine) -> str:
    if engine.draft_eager and engine.resolved in FULL_MODES:
        # Non-causal drafters (DFlash, DSpark): vLLM's own DFlash code names FlashAttention as the way out.
        return (
            "this backend has no FULL graphs for the drafter; FLASHINFER has with "
            "VLLM_SPECPATCH_ROUTE=spec_mask, --attention-backend FLASH_ATTN may have"
        )
    if engine.our_state in TROUBLE:
        return "vllm-specpatch did not apply; its line above says what it wants"
    if engine.our_state == "applied":
        return "vllm-specpatch applied and FULL graphs are missing all the same: report this log"
    if engine.our_state is not None:
        return f"vllm-specpatch says {engine.our_state!r}; its line above says why"
    if engine.backend not in (None, "FLASHINFER"):
        return f"the backend is {engine.backend}; vllm-specpatch patches FLASHINFER only"
    if any("VLLM_SPECPATCH" in note for note in engine.notes):
        return "vllm-specpatch said nothing and a VLLM_SPECPATCH variable was set: is it 0 or off?"
    return "vllm-specpatch said nothing here: run `vllm-specpatch doctor` where this server runs"


def worst(codes: Iterable[int]) -> int:
    """1 if anything is wrong, else 2 if anything cannot be told (nothing at all included), else 0."""
    seen = set(codes)
    return WRONG if WRONG in seen else CANNOT_TELL if CANNOT_TELL in seen or not seen else GOOD


# -- rendering -----------------------------------------------------------------------------------


def _graphs(graphs: dict[str, list[int]]) -> str:
    shown = [f"{key} {n}" if n == all_ else f"{key} {n} of {all_}" for key, (n, all_) in graphs.items()]
    return ", ".join(shown) or "-"


def rows(engine: Engine) -> dict[str, str]:
    """What is shown of an engine, in order; "-" where the log does not say."""
    speculation = engine.method or ("-" if engine.method is None else "none")
    speculation = "yes" if speculation == "?" else speculation
    table = {
        "vLLM": engine.version or "-",
        "runner": engine.runner or "-",
        "speculation": speculation + (f", k = {engine.k}" if engine.k else ""),
        "KV cache": engine.kv_cache_dtype or "-",
        "backend": (engine.backend or "-")
        + (f" ({engine.decode_backend}, {engine.arch})" if engine.decode_backend else ""),
        "drafter backend": engine.drafter_backend or "",
        "mode asked": engine.requested or "-",
        "mode resolved": (engine.resolved or "-") + (" (enforce_eager)" if engine.eager else ""),
        "downgrade warning": "none" if not engine.downgrade else f"yes, {engine.support or 'no piecewise'}",
        "target graphs": _graphs(engine.target_graphs),
        "drafter graphs": _graphs(engine.drafter_graphs),
        "drafter runs": DRAFTER_TEXT[engine.drafter],
        "graph memory": f"{engine.graph_gib:.2f} GiB" if engine.graph_gib is not None else "-",
        "vllm-specpatch": " / ".join(engine.ours) or "said nothing",
        "verdict": VERDICTS[engine.verdict],
    }
    return {label: text for label, text in table.items() if text}


@dataclass
class Column:
    """Engines of one file that are alike, shown as one."""

    file: str
    names: list[str]
    engine: Engine

    @property
    def title(self) -> str:
        if len(self.names) <= 3:
            return ", ".join(self.names)
        return f"{self.names[0]} to {self.names[-1]} ({len(self.names)} engines)"


def columns(file: str, found: Sequence[Engine]) -> list[Column]:
    result: list[Column] = []
    for engine in found:
        name = f"{engine.source} {engine.name}".strip()
        for column in result:
            if (rows(column.engine), column.engine.reason) == (rows(engine), engine.reason):
                column.names.append(name)
                break
        else:
            result.append(Column(file, [name], engine))
    return result


def render(shown: Sequence[Column]) -> str:
    """A table with one column for each (kind of) engine, then each verdict with its next step."""
    if not shown:
        return "no engine in this log: no line of a vLLM 0.24 to 0.33 start was found"
    files = list(dict.fromkeys(column.file for column in shown))
    width = max((WIDTH - LABEL) // len(shown) - 2, 18)
    tables = [rows(column.engine) for column in shown]
    labels = [label for label in rows(Engine("", drafter_backend="x")) if any(label in t for t in tables)]
    lines = []

    def row(label: str, cells: Sequence[str], mark: str = "") -> None:
        wrapped = [textwrap.wrap(cell, width) or [""] for cell in cells]
        for i in range(max(len(cell) for cell in wrapped)):
            parts = "  ".join((cell[i] if i < len(cell) else "").ljust(width) for cell in wrapped)
            lines.append(f"{(label + mark) if i == 0 else '':{LABEL}}  {parts}".rstrip())

    if len(files) > 1:
        row("", [column.file for column in shown])
    row("", [column.title for column in shown])
    for label in labels:
        cells = [table.get(label, "-") for table in tables]
        differs = len(files) > 1 and len(set(cells)) > 1
        row(label, cells, " *" if differs else "")
    lines.append("")
    for column in shown:
        engine = column.engine
        where = f"{column.file} {column.title}" if len(files) > 1 else column.title
        text = f"{where}: {VERDICTS[engine.verdict]}: {engine.reason}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
        for more in ([f"next step: {engine.next_step}"] if engine.next_step else []) + [
            f"note: {note}" for note in engine.notes
        ]:
            lines += textwrap.wrap(more, WIDTH, initial_indent="    ", subsequent_indent="    ")
    if len(files) > 1:
        lines += ["", "* differs between the files"]
    return "\n".join(lines)


# -- the command ---------------------------------------------------------------------------------


def read(stream: IO[bytes], name: str) -> list[Engine]:
    """The engines of an open log, gzip or not. Raises :class:`LogUnreadable` with one line."""
    try:
        buffered: Any = stream if hasattr(stream, "peek") else io.BufferedReader(stream)
        opened: Any = gzip.GzipFile(fileobj=buffered) if buffered.peek(2)[:2] == b"\x1f\x8b" else buffered
        return engines(records(physical_lines(opened)))
    except (OSError, EOFError, zlib.error) as e:
        raise LogUnreadable(f"{name}: {_plainly(e)}") from e


def read_file(name: str) -> list[Engine]:
    if name == "-":
        return read(sys.stdin.buffer, "standard input")
    try:
        with open(name, "rb") as stream:
            return read(stream, name)
    except OSError as e:
        raise LogUnreadable(f"{name}: {_plainly(e)}") from e


def _plainly(error: BaseException) -> str:
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
        return f"not a complete gzip file ({error})"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def check_log(arguments: argparse.Namespace) -> int:
    names = arguments.files or ["-"]
    if len(names) > 2 or names.count("-") > 1:
        print("vllm-specpatch check-log: give one log, or two to compare", file=sys.stderr)
        return CANNOT_TELL
    if "-" in names and sys.stdin.isatty():
        print("vllm-specpatch check-log: give a FILE, or pipe a log in", file=sys.stderr)
        return CANNOT_TELL
    try:
        found = [(name, read_file(name)) for name in names]
    except LogUnreadable as e:
        print(f"vllm-specpatch check-log: {e}", file=sys.stderr)
        return CANNOT_TELL
    code = worst(worst(engine.verdict for engine in some) for _, some in found)
    if arguments.json:
        report: dict[str, Any] = {
            "verdict": VERDICTS[code].lower(),
            "files": [{"file": name, "engines": [e.facts() for e in some]} for name, some in found],
        }
        if len(found) == 2 and all(some for _, some in found):
            left, right = (some[0].facts() for _, some in found)
            report["differs"] = {k: [left[k], right[k]] for k in left if left[k] != right[k]}
        print(json.dumps(report, indent=2))
        return code
    for name, some in found:
        if not some:
            print(f"{'standard input' if name == '-' else name}: {render([])}")
    short = [PurePath(name).name or name for name in names]
    titles = short if len(set(short)) == len(short) else names
    shown = [column for title, (_, some) in zip(titles, found) for column in columns(title, some)]
    if shown:
        print(render(shown))
    return code


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "check-log",
        help="whether a vLLM server log shows FULL CUDA graphs; two logs: side by side",
        description="Reads the log of a vLLM server (0.24 to 0.33; plain, gzip, docker, Ray or JSON) and "
        "says for each engine which backend, CUDA-graph mode and captures it ended with. Exit code 0: all "
        "is well, 1: FULL graphs were lost or the drafter runs eagerly, 2: cannot tell.",
    )
    p.add_argument(
        "files", nargs="*", metavar="FILE", help="one log, or two to compare; none or -: standard input"
    )
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=check_log)
