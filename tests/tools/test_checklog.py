"""check-log on what vLLM prints: real logs of 0.27.1, other releases by their format strings (logs/README.md)."""

import argparse
import gzip
import io
import json
import pathlib
import random
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specpatch import checklog

LOGS = pathlib.Path(__file__).parent / "logs"
REAL = sorted(path.name for path in LOGS.glob("0.27.1-*.txt"))
SINGLE, PIECEWISE_MODE, BOTH = "UNIFORM_SINGLE_TOKEN_DECODE", "PIECEWISE", "FULL_AND_PIECEWISE"


def read(data):
    return checklog.read(io.BytesIO(data), "test")


def log(name):
    return (LOGS / name).read_bytes()


def only(data):
    [engine] = read(data)
    return engine


def facts(engine):
    """Everything but the names, which container prefixes change."""
    return {k: v for k, v in engine.facts().items() if k not in ("name", "source")}


def run(*argv):
    top = argparse.ArgumentParser()
    checklog.add_parser(top.add_subparsers())
    arguments = top.parse_args(["check-log", *map(str, argv)])
    return arguments.run(arguments)


# log: verdict, backend, mode resolved, support in the warning, target graphs, drafter, our state
EXPECTED = {
    "0.24.0-v2-tp2-colour": (
        "wrong",
        "FLASHINFER",
        PIECEWISE_MODE,
        SINGLE,
        "PIECEWISE 8",
        "first step",
        None,
    ),
    "0.25.1-v2-dp2-tp2": ("good", "FLASH_ATTN", BOTH, None, "PIECEWISE 6, FULL 5", "full", None),
    "0.26.0-v2-dflash-eager": ("wrong", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 5", "eager", None),
    "0.26.0-v2-real-patched": ("good", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 4", "full", "applied"),
    "0.26.0-v2-real-stock": (
        "wrong",
        "FLASHINFER",
        PIECEWISE_MODE,
        SINGLE,
        "PIECEWISE 6",
        "first step",
        None,
    ),
    "0.27.1-v1-patched": ("good", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 6", "piecewise", "applied"),
    "0.27.1-v1-stock": ("wrong", "FLASHINFER", PIECEWISE_MODE, SINGLE, "PIECEWISE 6", "piecewise", None),
    "0.27.1-v2-dflash-patched": ("good", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 6", "full", "applied"),
    "0.27.1-v2-flash_attn-cut": (
        "cannot tell",
        "FLASH_ATTN",
        BOTH,
        None,
        "PIECEWISE 6, FULL 6",
        "unknown",
        None,
    ),
    "0.27.1-v2-flash_attn": ("good", "FLASH_ATTN", BOTH, None, "PIECEWISE 6, FULL 6", "full", None),
    "0.27.1-v2-fp8-patched": ("good", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 6", "full", "applied"),
    "0.27.1-v2-k1-patched": ("good", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 4", "full", "applied"),
    "0.27.1-v2-k1-stock": ("wrong", "FLASHINFER", PIECEWISE_MODE, SINGLE, "PIECEWISE 6", "piecewise", None),
    "0.27.1-v2-patched": ("good", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 6", "full", "applied"),
    "0.27.1-v2-spec_mask": ("good", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 6", "full", "applied"),
    "0.27.1-v2-spec_mask-died": ("wrong", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 6", "full", "applied"),
    "0.27.1-v2-stock": ("wrong", "FLASHINFER", PIECEWISE_MODE, SINGLE, "PIECEWISE 6", "first step", None),
    "0.28.0-v2-refused": (
        "wrong",
        "FLASHINFER",
        PIECEWISE_MODE,
        SINGLE,
        "PIECEWISE 6",
        "first step",
        "refused",
    ),
    "0.30.0-v2-real-patched": ("good", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 4", "full", "applied"),
    "0.30.0-v2-ray": ("good", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 5", "full", None),
    "0.31.0-v2-dp2-bars-unnamed": ("good", "FLASH_ATTN", BOTH, None, "-", "unknown", None),
    "0.32.0-v2-json": ("wrong", "FLASHINFER", PIECEWISE_MODE, SINGLE, "PIECEWISE 6", "first step", None),
    "0.33.0-v2-eager": ("good", "FLASH_ATTN", "NONE", None, "-", "eager", None),
    "0.33.0-v2-real-patched": ("good", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 4", "full", "applied"),
    "0.33.0-v2-real-upstream": ("good", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 4", "full", None),
    "0.33.0-v2-no-speculation": ("good", "FLASH_ATTN", BOTH, None, "PIECEWISE 6, FULL 5", "none", None),
    "0.33.0-v2-upstream-full": ("good", "FLASHINFER", BOTH, None, "PIECEWISE 6, FULL 5", "full", None),
}


def test_every_sample_is_expected():
    assert {path.stem for path in LOGS.glob("*.txt")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_samples(name):
    found = read(log(f"{name}.txt"))
    assert [e.name for e in found] == (
        ["DP0", "DP1"] if "-dp2-" in name else ["DP0"] if "ray" in name else ["engine"]
    )
    for e in found:
        shown = checklog.rows(e)["target graphs"]
        verdict = checklog.VERDICTS[e.verdict].lower()
        got = (verdict, e.backend, e.resolved, e.support, shown, e.drafter, e.our_state)
        assert got == EXPECTED[name]
        release, runner, *_ = name.split("-")
        assert e.version == release and e.runner == runner.upper() and e.starts == 1
        assert e.reason and (e.next_step or e.verdict == checklog.GOOD)


def test_details_of_a_real_log():
    e = only(log("0.27.1-v2-patched.txt"))
    assert (e.method, e.k, e.kv_cache_dtype, e.requested) == ("eagle", 7, "auto", BOTH)
    assert (e.decode_backend, e.arch, e.graph_gib) == ("flashinfer-native", "sm90", 0.36)
    assert e.drafter_graphs == {"prefill PIECEWISE": [6, 6], "prefill FULL": [6, 6], "decode FULL": [3, 3]}
    assert [line.partition(":")[0] for line in e.ours] == ["flashinfer-spec-decode applied"]
    assert only(log("0.27.1-v2-fp8-patched.txt")).kv_cache_dtype == "fp8"
    v1 = only(log("0.27.1-v1-patched.txt"))
    assert (v1.backend, v1.drafter_backend) == ("FLASHINFER", "FLASH_ATTN")
    off = only(log("0.27.1-v1-stock.txt"))
    assert any(
        "VLLM_SPECPATCH variable was set" in note for note in off.notes
    )  # said before the engine starts
    assert "0 or off" in off.next_step


def test_an_engine_that_died_is_no_good_news():
    e = only(log("0.27.1-v2-spec_mask-died.txt"))
    assert e.died == "CUDA error: an illegal memory access was encountered"
    assert e.reason == f"the engine died: {e.died}" and "VLLM_SPECPATCH=0" in e.next_step
    # A restart is another matter.
    again = log("0.27.1-v2-spec_mask-died.txt") + log("0.27.1-v2-spec_mask.txt")
    assert (only(again).died, only(again).verdict) == (None, checklog.GOOD)
    for line in (
        "(EngineCore_DP0 pid=71) ERROR 11-30 07:30:51 [core.py:999] EngineCore encountered a fatal error.",
        "ERROR 11-30 07:30:51 [core.py:999] EngineCore failed to start.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ):
        assert only(log("0.27.1-v2-flash_attn.txt") + line.encode() + b"\n").verdict == checklog.WRONG
    quiet = b"WARNING 11-30 07:30:51 [x.py:1] For debugging CUDA errors set CUDA_LAUNCH_BLOCKING=1\n"
    assert only(log("0.27.1-v2-flash_attn.txt") + quiet).verdict == checklog.GOOD


# -- the same log in other wrappings -------------------------------------------------------------


def lines_of(data):
    # Not splitlines(): a carriage return does not end a line of a log.
    return re.findall(r"[^\n]*\n", data.decode())


def compose(data):
    return "".join(f"\x1b[36mvllm-1  |\x1b[0m {line}" for line in lines_of(data)).encode()


def kubectl(data):
    return "".join(f"[pod/llm-0/vllm] {line}" for line in lines_of(data)).encode()


def docker_timestamps(data):
    return "".join(f"2026-11-30T04:05:13.123456789Z {line}" for line in lines_of(data)).encode()


def docker_json(data):
    """The json-file driver: a line longer than 16 KiB comes in pieces; other streams come between."""
    out, noise = [], {"log": "GET /health\n", "stream": "stdout", "time": "2026-11-30T04:05:13.1Z"}
    for line in lines_of(data):
        for i in range(0, len(line), 700):
            out.append({"log": line[i : i + 700], "stream": "stderr", "time": "2026-11-30T04:05:13.1Z"})
            out.append(noise)
    return "".join(json.dumps(entry) + "\n" for entry in out).encode()


def cri(data):
    out = []
    for line in lines_of(data):
        body, stamp = line[:-1], "2026-11-30T04:05:13.123456789Z stderr"
        while len(body) > 500:
            out.append(f"{stamp} P {body[:500]}\n")
            body = body[500:]
        out.append(f"{stamp} F {body}\n")
    return "".join(out).encode()


def coloured(data):
    text = re.sub(
        r"(?m)^(INFO|WARNING) (\S+ \S+) (\[[^\]]*\])",
        "\x1b[32m\\1\x1b[0m \x1b[90m\\2\x1b[0m \x1b[90m\\3\x1b[0m",
        data.decode(),
    )
    return text.encode()


def prefixed(data):
    return "".join(f"(EngineCore_0 pid=71) {line}" for line in lines_of(data)).encode()


def syslog(data):
    return "".join(f"Nov 30 04:05:13 node7 vllm[71]: {line}" for line in lines_of(data)).encode()


def json_records(data):
    """--logging-config.formatter json of vLLM 0.32: records are JSON, progress bars are not."""
    out = []
    for line in lines_of(data):
        match = re.match(r"(INFO|WARNING) (\S+ \S+) \[[^\]]*\] (.*)\n", line)
        if match is None:
            out.append(line)
            continue
        entry = {"asctime": match[2], "levelname": match[1], "name": "vllm", "processName": "EngineCore"}
        out.append(json.dumps({**entry, "process": 71, "message": match[3]}) + "\n")
    return "".join(out).encode()


def docker_json_of_json(data):
    return docker_json(json_records(data))


def wrapped_by_ray(data):
    return "".join(
        f"\x1b[36m(RayWorkerWrapper pid=88, ip=192.0.2.7)\x1b[0m {line}" for line in lines_of(data)
    ).encode()


WRAPPINGS = (
    compose,
    kubectl,
    docker_timestamps,
    docker_json,
    cri,
    coloured,
    prefixed,
    syslog,
    json_records,
    docker_json_of_json,
    wrapped_by_ray,
    gzip.compress,
    lambda data: data.replace(b"\n", b"\r\n"),
    lambda data: gzip.compress(compose(coloured(data))),
)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrappings_change_nothing(name, wrapping):
    assert facts(only(wrapping(log(name)))) == facts(only(log(name)))


def test_containers_are_told_apart():
    stock, patched = log("0.27.1-v2-stock.txt"), log("0.27.1-v2-patched.txt")
    other = "".join(f"vllm-b-1  | {line}" for line in lines_of(patched)).encode()
    found = read(compose(stock) + b"redis-1  | Ready to accept connections\n" + other)
    assert [(e.source, e.verdict) for e in found] == [("vllm-1", checklog.WRONG), ("vllm-b-1", checklog.GOOD)]


def test_interleaved_engines_keep_their_bars():
    """vLLM prefixes a line when it starts; a bar goes on without prefix after another process wrote."""
    stock, patched = (lines_of(log(f"0.27.1-v2-{n}.txt")) for n in ("stock", "patched"))
    texts = {"EngineCore_DP0 pid=5": stock, "EngineCore_DP1 pid=6": patched}
    chunks = {name: [] for name in texts}
    for name, lines in texts.items():
        for line in lines:
            head, *updates = line.split("\r")
            if not updates:
                chunks[name].append(f"({name}) {line}")
                continue
            chunks[name].append(f"({name}) {head}\r{updates[0]}")  # starts the bar, no newline
            chunks[name] += ["\n\r" + update for update in updates[1:]]  # continues on a line of its own
    for seed in range(20):
        order, rest, text = random.Random(seed), {name: list(parts) for name, parts in chunks.items()}, ""
        while left := [name for name, parts in rest.items() if parts]:
            name = order.choice(left)
            text += rest[name].pop(0)
            # Two bars of one name at a time cannot be told apart, so one that has begun ends first; lines
            # of the other engine come between its updates all the same.
            while rest[name] and rest[name][0].startswith("\n\r"):
                other = next(n for n in rest if n != name)
                if rest[other] and "Capturing" not in rest[other][0] and order.random() < 0.5:
                    text += rest[other].pop(0)
                text += rest[name].pop(0)
        zero, one = read(text.encode())
        assert (zero.name, zero.verdict, one.name, one.verdict) == (
            "DP0",
            checklog.WRONG,
            "DP1",
            checklog.GOOD,
        )
        assert zero.target_graphs == {"PIECEWISE": [6, 6]}
        assert one.target_graphs == {"PIECEWISE": [6, 6], "FULL": [6, 6]}
        assert zero.downgrade and not one.downgrade and not zero.ours and one.ours


def test_ray_workers_of_two_engines():
    """Ray's prefix comes inside that of the engine, which alone has the data-parallel rank."""
    text = ""
    for rank, name in enumerate(("stock", "patched")):
        prefix = f"(EngineCore_DP{rank} pid={rank}) \x1b[36m(RayWorkerWrapper pid=8{rank}, ip=192.0.2.{rank})\x1b[0m "
        text += "".join(prefix + line for line in lines_of(log(f"0.27.1-v2-{name}.txt")))
    found = read(text.encode())
    assert [(e.name, e.verdict) for e in found] == [("DP0", checklog.WRONG), ("DP1", checklog.GOOD)]


# -- rules ---------------------------------------------------------------------------------------


def test_a_restart_counts_once():
    e = only(log("0.27.1-v2-stock.txt") + log("0.27.1-v2-patched.txt"))
    assert e.starts == 2 and e.verdict == checklog.GOOD and not e.downgrade
    assert facts(e) | {"starts": 1, "notes": []} == facts(only(log("0.27.1-v2-patched.txt"))) | {"notes": []}
    assert only(log("0.27.1-v2-patched.txt") + log("0.27.1-v2-stock.txt")).verdict == checklog.WRONG


def test_a_quoted_warning_is_not_one():
    [quote] = [line for line in lines_of(log("0.27.1-v2-stock.txt")) if line.startswith("RESULT")]
    assert "setting cudagraph_mode=PIECEWISE" in quote
    assert only(log("0.27.1-v2-patched.txt") + quote.encode()).verdict == checklog.GOOD


def test_ranks_that_disagree_are_wrong():
    def rank(name, data):
        return "".join(f"({name}) {line}" for line in lines_of(log(data)) if "Initializing" not in line)

    [start] = [line for line in lines_of(log("0.27.1-v2-stock.txt")) if "Initializing" in line]
    text = f"(EngineCore pid=1) {start}" + rank("Worker_TP0 pid=2", "0.27.1-v2-patched.txt")
    assert only(text.encode()).verdict == checklog.GOOD
    text += "".join(
        line
        for line in rank("Worker_TP1 pid=3", "0.27.1-v2-stock.txt").splitlines(True)
        if "CUDAGraphMode" in line
    )
    e = only(text.encode())
    assert e.verdict == checklog.WRONG and "disagree" in e.reason and "1 patched, 1 downgraded" in e.reason


def test_full_promised_and_not_captured_is_wrong():
    data = log("0.27.1-v2-patched.txt")
    without = re.sub(rb"\rCapturing CUDA graphs \(FULL\)[^\r\n]*", b"", data)
    e = only(without)
    assert e.verdict == checklog.WRONG and "none were captured" in e.reason


def test_piecewise_on_request_is_good():
    data = log("0.27.1-v2-stock.txt")
    asked = data.replace(b"<CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>", b"<CUDAGraphMode.PIECEWISE: 1>")
    e = only(re.sub(rb"WARNING[^\n]*is not supported with spec-decode[^\n]*\n", b"", asked))
    assert (e.requested, e.resolved, e.verdict) == ("PIECEWISE", "PIECEWISE", checklog.GOOD)


def test_without_progress_bars_the_mode_decides():
    bars = re.compile(rb"\rCapturing [^\r\n]*")
    assert only(bars.sub(b"", log("0.27.1-v2-patched.txt"))).verdict == checklog.GOOD
    assert only(bars.sub(b"", log("0.27.1-v2-stock.txt"))).verdict == checklog.WRONG


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([n for n in REAL if EXPECTED[n[:-4]][0] != "wrong"]), st.floats(0, 1))
def test_a_log_that_is_still_growing_is_never_called_wrong(name, part):
    data = log(name)
    for e in read(data[: int(len(data) * part)]):
        assert e.verdict in (checklog.CANNOT_TELL, checklog.GOOD)
        assert e.captured or e.verdict == checklog.CANNOT_TELL


@pytest.mark.parametrize("end", [b"<C", b"<CUDAGraphMode.FULL", b"<CUDAGraphMode.FULL_"])
def test_a_mode_that_is_still_being_written_is_not_a_mode(end):
    data = log("0.27.1-v2-patched.txt")
    at = data.index(b"'cudagraph_mode': " + end) + len(b"'cudagraph_mode': " + end)
    e = only(data[:at])
    assert e.verdict == checklog.CANNOT_TELL and not e.requested


# -- never raises --------------------------------------------------------------------------------

FRAGMENTS = [
    *(
        b"(EngineCore_DP0 pid=1) ",
        b"(Worker_DP1_TP0 pid=2)",
        b"(EngineCore_7 pid=",
        b"_DP",
        b"(pid=",
        b", ip=",
    ),
    *(b"\rCapturing CUDA graphs (FULL): 100%|##| 6/6 [", b"Capturing decode CUDA graphs (FULL):   0%|"),
    *(b"| 99999999999/3", "\u0663".encode(), b"INFO 11-30 04:05:13 [a.py:1] ", b"\n", b"\r", b"\r\n"),
    b"CUDAGraphMode.FULL is not supported with spec-decode for attention backend X (support: ",
    *(b"Y); setting cudagraph_mode=", b"Initializing a V1 LLM engine (v0) with config: "),
    *(
        b"speculative_config=SpeculativeConfig(method='",
        b"num_spec_tokens=",
        b"'cudagraph_mode': <CUDAGraphMode.",
    ),
    *(b"vllm-specpatch 0.1.0: ", b"not applied (refused): ", b"x applied: ", b"{", b"}", b'{"log":"'),
    *(b'","stream":"stderr"}', b'{"message":"Using ', b"Using FLASHINFER backend.", b"Loading drafter model"),
    *(b"\x1b[32m", b"\x1b]0;", b"vllm-1  | ", b"2026-11-30T04:05:13Z stderr P ", b"[pod/a/b] "),
    *(b"Graph capturing finished in 1 secs, took ", b"-1.5 GiB", b"1.2.3 GiB", b"\xff\x00"),
]


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=4)), max_size=40).map(b"".join),
    )
)
def test_no_content_raises(data):
    try:
        found = read(data)
    except checklog.LogUnreadable:
        assert data.startswith(b"\x1f\x8b")
        return
    shown = checklog.render(checklog.columns("a", found) + checklog.columns("b", found))
    assert shown and json.dumps([e.facts() for e in found])


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(REAL), st.randoms(use_true_random=False))
def test_no_damage_raises(name, chance):
    data = bytearray(log(name))
    for _ in range(20):
        i = chance.randrange(len(data))
        if chance.random() < 0.5:
            data[i] = chance.randrange(256)
        else:
            del data[i : i + chance.randrange(60)]
    for e in read(bytes(data)):
        assert e.verdict in checklog.VERDICTS


# -- the command ---------------------------------------------------------------------------------


def test_exit_codes_and_text(capsys):
    assert run(LOGS / "0.27.1-v2-patched.txt") == 0
    assert "engine: good: FULL CUDA graphs for target and drafter" in capsys.readouterr().out
    assert run(LOGS / "0.27.1-v2-stock.txt") == 1
    out = capsys.readouterr().out
    assert "WRONG: FULL CUDA graphs were lost" in out and "vllm-specpatch doctor" in out
    assert run(LOGS / "0.27.1-v2-flash_attn-cut.txt") == 2
    assert "the log ends during graph capture" in capsys.readouterr().out


def test_two_logs_side_by_side(capsys):
    assert run(LOGS / "0.27.1-v2-stock.txt", LOGS / "0.25.1-v2-dp2-tp2.txt") == 1
    out = capsys.readouterr().out
    rows = {line[:22].strip(): line[22:] for line in out.splitlines() if not line.startswith(" ")}
    assert rows["backend *"].split() == ["FLASHINFER", "(flashinfer-native,", "sm90)", "FLASH_ATTN"]
    assert rows["mode resolved *"].split() == ["PIECEWISE", "FULL_AND_PIECEWISE"]
    assert "DP0, DP1" in out and all(len(line) <= 110 for line in out.splitlines())


def test_json(capsys):
    assert run("--json", LOGS / "0.27.1-v2-stock.txt", LOGS / "0.27.1-v2-patched.txt") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "wrong"
    assert [f["engines"][0]["verdict"] for f in report["files"]] == ["wrong", "good"]
    assert report["differs"]["resolved"] == ["PIECEWISE", "FULL_AND_PIECEWISE"]
    assert "backend" not in report["differs"]


class Stdin:
    def __init__(self, data, tty=False):
        self.buffer, self.tty = io.BufferedReader(io.BytesIO(data)), tty

    def isatty(self):
        return self.tty


@pytest.mark.parametrize("argv", [[], ["-"]])
def test_standard_input(monkeypatch, capsys, argv):
    monkeypatch.setattr(sys, "stdin", Stdin(gzip.compress(log("0.27.1-v2-patched.txt"))))
    assert run(*argv) == 0
    assert "good" in capsys.readouterr().out


def test_a_users_mistakes_are_one_line(monkeypatch, capsys, tmp_path):
    (cut := tmp_path / "cut.gz").write_bytes(gzip.compress(log("0.27.1-v2-stock.txt"))[:800])
    (broken := tmp_path / "broken.gz").write_bytes(b"\x1f\x8b" + b"no gzip at all")
    monkeypatch.setattr(sys, "stdin", Stdin(b"", tty=True))
    for argv, says in (
        ([tmp_path / "missing.log"], "No such file or directory"),
        ([tmp_path], "Is a directory"),
        ([cut], "not a complete gzip file"),
        ([broken], "not a complete gzip file"),
        ([], "give a FILE"),
        (["a", "b", "c"], "one log, or two"),
        (["-", "-"], "one log, or two"),
    ):
        assert run(*argv) == 2
        said = capsys.readouterr()
        assert said.out == "" and len(said.err.splitlines()) == 1 and says in said.err


def test_a_file_without_vllm_cannot_tell(capsys, tmp_path):
    (empty := tmp_path / "empty.log").write_bytes(b"")
    (other := tmp_path / "other.log").write_bytes(b"nginx: the backend is down\n" * 50)
    for path in (empty, other):
        assert run(path) == 2
        assert "no engine in this log" in capsys.readouterr().out
    assert run("--json", empty) == 2
    assert json.loads(capsys.readouterr().out)["files"] == [{"file": str(empty), "engines": []}]
