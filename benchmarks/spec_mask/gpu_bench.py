"""Times verify attention side by side with FlashInfer's own multi-token decode, and others.

    python benchmarks/spec_mask/gpu_bench.py --seconds 300
    python benchmarks/spec_mask/gpu_bench.py --with native,fa2,fa3,xqa
    python benchmarks/spec_mask/gpu_bench.py --tune         other tiles, splits and planner constants

Each figure is the time of one layer inside a captured graph whose launches rotate over as many KV
caches as it takes to leave the L2 cache behind; medians over replays. Contenders run one after the
other within one round, rounds are repeated, so a drift of the clocks hits all of them alike. Every
contender's output is compared with ours first.

Contenders: ``native`` is FlashInfer's decode wrapper with q_len_per_req (modules from FLASHINFER_AOT,
a folder of <uri>/<uri>.so, if set, else compiled by FlashInfer); ``fa2`` and ``fa3`` are vLLM's
varlen kernels (16-bit caches); ``xqa`` is FlashInfer's. vLLM's FA2 comes as sm_80 code and PTX:
elsewhere the driver compiles it at the first use of each head_dim and kind, for 20 s and more. A
contender that cannot run here leaves its column empty and its reason in the report. Cases run in a
worker process that notes what it is about to do: when a kernel faults, which ruins a CUDA context,
the report says which contender of which case it was, and a new worker goes on behind it. Writes
bench.json (or tune.json) to --out or $OUT.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import checkout

checkout.use_checkout()

import torch  # noqa: E402
from cases import KV_TORCH  # noqa: E402
from specs import check_spec  # noqa: E402

from vllm_specpatch.kernels import build  # noqa: E402
from vllm_specpatch.kernels.spec_mask import Plan, Tuning, load, run  # noqa: E402

GEOMETRIES = [(32, 8, 128), (24, 4, 256)]
PAGE = 16
L2_BYTES = 256 * 2**20  # rotate over at least this many bytes of KV per graph
MEMORY_LIMIT = 60 * 2**30


@dataclasses.dataclass
class Case:
    geometry: tuple[int, int, int]
    dtype_kv: str
    batch: int
    context: int
    q_len: int

    @property
    def kv_bytes(self) -> int:
        _, kv_heads, head_dim = self.geometry
        size = torch.empty(0, dtype=KV_TORCH[self.dtype_kv]).element_size()
        return 2 * self.batch * self.context * kv_heads * head_dim * size

    def __str__(self) -> str:
        heads, kv_heads, head_dim = self.geometry
        return (
            f"{heads}/{kv_heads}/{head_dim} {self.dtype_kv.replace('float', 'f'):9s} "
            f"b{self.batch:<3d} ctx {self.context:<6d} q{self.q_len:<2d}"
        )


class Inputs:
    """Random inputs of a case, ``copies`` caches of them, shared by all contenders."""

    def __init__(self, case: Case) -> None:
        heads, kv_heads, head_dim = case.geometry
        self.case = case
        self.pages_per_request = -(-case.context // PAGE)
        pages = case.batch * self.pages_per_request
        self.copies = max(1, min(-(-L2_BYTES // case.kv_bytes), 24, MEMORY_LIMIT // case.kv_bytes))
        self.layers = max(self.copies, 4)
        dtype = KV_TORCH[case.dtype_kv]
        self.caches = []
        for _ in range(self.copies):
            cache = torch.empty(pages, 2, PAGE, kv_heads, head_dim, dtype=dtype, device="cuda")
            if dtype.itemsize == 1:
                # Random finite bytes: 0x7f and 0xff would be NaN.
                cache.view(torch.uint8).random_(0, 0x70)
            else:
                cache.normal_()
            self.caches.append(cache)
        self.tables = [
            torch.randperm(pages, device="cuda").int().view(case.batch, -1) for _ in range(self.copies)
        ]
        rows = case.batch * case.q_len
        self.q = torch.randn(rows, heads, head_dim, device="cuda").bfloat16()
        self.out = torch.empty_like(self.q)
        self.seq_lens = torch.full((case.batch,), case.context, dtype=torch.int32, device="cuda")
        self.start = torch.arange(0, rows + 1, case.q_len, dtype=torch.int32, device="cuda")


def ours(inputs: Inputs, spec=None, **plan_options):
    """(layer function, plan function, plan) of our kernels."""
    case = inputs.case
    heads, kv_heads, head_dim = case.geometry
    spec = spec or check_spec(head_dim, heads // kv_heads, dtype_kv=case.dtype_kv)
    plan = Plan(
        load(spec),
        num_kv_heads=kv_heads,
        max_requests=case.batch,
        max_rows=case.batch * case.q_len,
        max_q_len=case.q_len,
        max_kv_len=inputs.pages_per_request * PAGE,
        page_table_stride=inputs.pages_per_request,
        **plan_options,
    )

    def layer(i):
        c = i % inputs.copies
        run(plan, inputs.q, inputs.caches[c][:, 0], inputs.caches[c][:, 1], inputs.tables[c], out=inputs.out)

    def update():
        plan.update(inputs.seq_lens, inputs.start)

    update()
    return layer, update, plan


class Native:
    """FlashInfer's decode wrapper with q_len_per_req: fa2, tensor cores, graph buffers."""

    workspace = None

    def __init__(self, inputs: Inputs) -> None:
        import flashinfer

        if Native.workspace is None:
            Native.workspace = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        case = inputs.case
        heads, kv_heads, head_dim = case.geometry
        self.inputs = inputs
        pages = case.batch * inputs.pages_per_request
        indptr = torch.arange(0, pages + 1, inputs.pages_per_request, dtype=torch.int32)
        last = torch.full((case.batch,), (case.context - 1) % PAGE + 1, dtype=torch.int32)
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            Native.workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            backend="fa2",
            paged_kv_indptr_buffer=torch.zeros(case.batch + 1, dtype=torch.int32, device="cuda"),
            paged_kv_indices_buffer=torch.zeros(pages, dtype=torch.int32, device="cuda"),
            paged_kv_last_page_len_buffer=torch.zeros(case.batch, dtype=torch.int32, device="cuda"),
        )
        self.args = (indptr, inputs.tables[0].view(-1), last, heads, kv_heads, head_dim, PAGE)
        self.options = {
            "q_data_type": torch.bfloat16,
            "kv_data_type": KV_TORCH[case.dtype_kv],
            "q_len_per_req": case.q_len,
        }
        self.plan()

    def plan(self) -> None:
        self.wrapper.plan(*self.args, **self.options)

    def layer(self, i: int) -> None:
        # The wrapper reads one index buffer; every cache is read through the same permutation.
        cache = self.inputs.caches[i % self.inputs.copies]
        self.wrapper.run(self.inputs.q, (cache[:, 0], cache[:, 1]), out=self.inputs.out)


class FlashAttention:
    """vLLM's flash_attn_varlen_func over the paged cache."""

    def __init__(self, inputs: Inputs, version: int) -> None:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
        from vllm.vllm_flash_attn.flash_attn_interface import (
            fa_version_unsupported_reason,
            is_fa_version_supported,
        )

        if not is_fa_version_supported(version):
            raise Unavailable(fa_version_unsupported_reason(version))
        if not inputs.case.dtype_kv.startswith("bfloat16"):
            raise Unavailable("an fp8 cache needs an fp8 query there")
        self.function, self.inputs, self.version = flash_attn_varlen_func, inputs, version

    def layer(self, i: int) -> None:
        x = self.inputs
        c = i % x.copies
        self.function(
            x.q,
            x.caches[c][:, 0],
            x.caches[c][:, 1],
            max_seqlen_q=x.case.q_len,
            cu_seqlens_q=x.start,
            max_seqlen_k=x.case.context,
            seqused_k=x.seq_lens,
            block_table=x.tables[c],
            causal=True,
            out=x.out,
            softmax_scale=x.case.geometry[2] ** -0.5,
            fa_version=self.version,
        )


class Xqa:
    """FlashInfer's XQA decode; a causal mask in bits where there is more than one row."""

    workspace = None

    def __init__(self, inputs: Inputs) -> None:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        # Its modules call the driver. One that was linked where there is none does not name it, and then the
        # process ends at the first such call (with fp8: 1 and 16 rows).
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        if Xqa.workspace is None:
            Xqa.workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device="cuda")
        self.function, self.inputs = xqa_batch_decode_with_kv_cache, inputs
        self.seq_lens = inputs.seq_lens.view(torch.uint32)
        q_len, words = inputs.case.q_len, (inputs.case.q_len + 31) // 32 * 2
        self.mask = None
        if q_len > 1:
            rows = [[(2 ** (r + 1) - 1) >> 16 * w & 0xFFFF for w in range(words)] for r in range(q_len)]
            rows = [[v - 2**16 if v >= 2**15 else v for v in row] for row in rows]
            mask = torch.tensor([rows] * inputs.case.batch, dtype=torch.int16, device="cuda")
            self.mask = mask.view(torch.uint16)

    def layer(self, i: int) -> None:
        x = self.inputs
        c = i % x.copies
        self.function(
            x.q,
            (x.caches[c][:, 0], x.caches[c][:, 1]),
            Xqa.workspace,
            x.tables[c],
            self.seq_lens,
            x.case.context,
            bmm1_scale=x.case.geometry[2] ** -0.5,
            bmm2_scale=1.0,
            out=x.out,
            q_len_per_req=x.case.q_len,
            mask=self.mask,
        )


class Unavailable(RuntimeError):
    """A contender that does not run this case, and why."""


CONTENDERS = {
    "native": Native,
    "fa2": lambda inputs: FlashAttention(inputs, 2),
    "fa3": lambda inputs: FlashAttention(inputs, 3),
    "xqa": Xqa,
}


class Progress:
    """Leaves a note of what is about to run, for the process that outlives a fault."""

    def __init__(self, path: str) -> None:
        self.path = Path(path) if path else None

    def step(self, case: int, what: str) -> None:
        torch.cuda.synchronize()  # a fault belongs to what was noted before
        if self.path is not None:
            self.path.write_text(json.dumps({"case": case, "step": what}))


def capture(layer, layers):
    """A graph of all layers. Ends with the device idle, so that a fault shows here."""
    stream = torch.cuda.Stream()
    # Inputs are filled and plans are made on the current stream; streams do not wait for each other.
    # A warm-up that overtakes them would read an unplanned batch.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(layers, 3)):
            layer(i)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(layers):
            layer(i)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def outputs_differ(inputs: Inputs, layer, ours_out) -> float:
    """Largest relative error of a contender's output rows against ours, for the first cache."""
    inputs.out.fill_(float("nan"))
    layer(0)
    got, want = inputs.out.float(), ours_out.float()
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-6)).nan_to_num(9e9).max())


def replay_times(graphs, layers, seconds):
    """Median microseconds per layer of each graph; graphs take turns."""
    times = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    begin = time.time()
    while True:
        for name, graph in graphs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            b.synchronize()
            times[name].append(a.elapsed_time(b) * 1000 / layers)
        if time.time() - begin > seconds and len(next(iter(times.values()))) >= 5:
            return {name: statistics.median(values) for name, values in times.items()}


def copy_bandwidth():
    """Bytes read and written per second of a large device-to-device copy."""
    a = torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda").random_(0, 255)
    b = torch.empty_like(a)
    best = 0.0
    for _ in range(12):
        x, y = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        x.record()
        b.copy_(a)
        y.record()
        y.synchronize()
        best = max(best, 2 * a.numel() / (x.elapsed_time(y) / 1000))
    return best


def planner_time(requests, q_len=8):
    """Microseconds of one plan.update kernel, from a graph of so many that starting it counts for little."""
    plan = Plan(
        load(check_spec(128, 4)),
        num_kv_heads=8,
        max_requests=requests,
        max_rows=requests * q_len,
        max_q_len=q_len,
        max_kv_len=131072,
        page_table_stride=8192,
    )
    lens = torch.randint(1, 131072, (requests,), dtype=torch.int32, device="cuda")
    start = torch.arange(0, requests * q_len + 1, q_len, dtype=torch.int32, device="cuda")
    graph = capture(lambda _: plan.update(lens, start), 400)
    return replay_times({"plan": graph}, 400, 0.2)["plan"]


def cases():
    for geometry in GEOMETRIES:
        for dtype_kv in ("bfloat16", "float8_e4m3fn"):
            for context in (8192, 1024, 32768, 131072, 4096):
                for batch in (1, 8, 32, 128, 4):
                    for q_len in (8, 1, 4, 16):
                        case = Case(geometry, dtype_kv, batch, context, q_len)
                        if case.kv_bytes <= MEMORY_LIMIT // 2:
                            yield case


def spread(items):
    """Order for a time budget: a coarse pass over the whole grid first, then the rest."""
    items = list(items)
    order = [i for step in range(11) for i in range(step, len(items), 11)]
    return [items[i] for i in order]


def use_prebuilt_flashinfer():
    folder = os.environ.get("FLASHINFER_AOT")
    if folder:
        from flashinfer.jit import env

        env.FLASHINFER_AOT_DIR = Path(folder)


def bench(args, report, progress, names):
    """Times the cases ``args.todo``; one JSON line each into ``args.rows``."""
    every = spread(cases())
    for index in args.todo:
        if time.time() > args.deadline:
            break
        case = every[index]
        progress.step(index, "inputs")
        inputs = Inputs(case)
        progress.step(index, "ours")
        layer, _, plan = ours(inputs)
        graphs = {"ours": capture(layer, inputs.layers)}
        layer(0)
        want = inputs.out.clone()
        contenders, missing, differs, took = [], {}, {}, {}
        for name in names:
            progress.step(index, name)
            begin = time.time()
            try:
                other = CONTENDERS[name](inputs)
                differs[name] = outputs_differ(inputs, other.layer, want)
                graphs[name] = capture(other.layer, inputs.layers)
                contenders.append(other)  # owns buffers that the graph reads
            except Exception as error:
                torch.cuda.synchronize()  # raises if the context is lost, which ends this worker
                missing[name] = f"{type(error).__name__}: {str(error)[:300]}"
            took[name] = round(time.time() - begin, 3)
        progress.step(index, "replays")
        got = replay_times(graphs, inputs.layers, args.per_case)
        chunk, ctas = plan.buffer[:2].tolist()
        share = case.kv_bytes / (got["ours"] * 1e-6) / report["copy_bandwidth"]
        row = {
            **dataclasses.asdict(case),
            "kv_bytes": case.kv_bytes,
            **{f"{k}_us": v for k, v in got.items()},
            "share_of_copy": share,
            "grid": plan.shape["grid"],
            "ctas": ctas,
            "chunk": chunk,
            "copies": inputs.copies,
            "differs": differs,
            "missing": missing,
            "made_in_s": took,
        }
        with open(args.rows, "a") as file:
            file.write(json.dumps(row) + "\n")
        columns = "".join(
            f" {got[n]:9.1f} {got['ours'] / got[n]:6.3f}" if n in got else f" {'-':>9s} {'':6s}"
            for n in names
        )
        far = "".join(f"  {n} DIFFERS {d:.2g}" for n, d in differs.items() if not d < 0.05)
        print(
            f"{case!s:44s} {got['ours']:9.1f} {100 * share:6.1f}%{columns}  "
            f"{ctas}/{plan.shape['grid']} {chunk}{far}",
            flush=True,
        )
        del inputs, graphs, layer, plan, contenders, want
        torch.cuda.empty_cache()


def tune(args, progress):
    """Other choices than the default for a few shapes."""
    print(f"{'case':44s} {'choice':28s} {'us':>9s}  grid chunk")
    every = tune_cases()
    for index in args.todo:
        if time.time() > args.deadline:
            break
        tune_case(args, progress, index, every[index])
        torch.cuda.empty_cache()


def tune_cases():
    shapes = [(b, c, q) for c in (1024, 8192, 32768) for b in (1, 8, 20, 32) for q in (1, 8, 16)]
    return [Case(g, d, *s) for g in GEOMETRIES for d in ("bfloat16", "float8_e4m3fn") for s in shapes]


def tune_case(args, progress, index, case):
    progress.step(index, "inputs")
    inputs = Inputs(case)
    choices = {"default": {}, "no split": {"split": "none"}}
    for pieces in (2, 4, 8, 16, 32):
        chunk = -(-case.context // pieces // 16) * 16
        if chunk >= 64:
            choices[f"{pieces} chunks"] = {"split": chunk}
    choices.update({name: {"tuning": tuning} for name, tuning in TUNINGS.items()})
    graphs, plans, seen = {}, {}, set()
    for name, options in choices.items():
        progress.step(index, name)
        layer, _, plan = ours(inputs, **options)
        kind = (*plan.buffer[:2].tolist(), plan.shape["grid"], plan.shape["split_mode"])
        if kind in seen:  # other constants, and the same choice
            continue
        seen.add(kind)
        plans[name], graphs[name] = plan, capture(layer, inputs.layers)
    progress.step(index, "replays")
    got = replay_times(graphs, inputs.layers, args.per_case)
    with open(args.rows, "a") as file:
        for name, us in got.items():
            shape = plans[name].shape
            chunk, ctas = plans[name].buffer[:2].tolist()
            row = {
                **dataclasses.asdict(case),
                "choice": name,
                "us": us,
                "ctas": ctas,
                "chunk": chunk,
                **{field: shape[field] for field in ("grid", "tile_q", "min_chunk", "wave_ctas")},
            }
            file.write(json.dumps(row) + "\n")
            print(f"{case!s:44s} {name:28s} {us:9.1f}  {ctas}/{shape['grid']} {chunk}", flush=True)


# Planner constants that make other choices in the same grid.
TUNINGS = {
    f"CTA {cta}, alone {lone}%": Tuning(cta_tokens=cta, lone_percent=lone)
    for cta in (64, 192, 512, 1024)
    for lone in (135, 165, 200, 250, 300)
}


def worker(args) -> int:
    """Runs cases until one faults, the time is over or there are no more."""
    torch.manual_seed(0)
    use_prebuilt_flashinfer()
    progress = Progress(args.progress)
    report = json.loads(Path(args.report).read_text()) if Path(args.report).exists() else {}
    if not report:
        progress.step(-1, "copy bandwidth and planner")
        report = {
            "gpu": torch.cuda.get_device_name(),
            "flashinfer": build.flashinfer_version(),
            "planner_us": {},
            "copy_bandwidth": copy_bandwidth(),
            "kernels": {},
        }
        print(f"{report['gpu']}: copy {report['copy_bandwidth'] / 1e12:.2f} TB/s (read + write)")
        for geometry in GEOMETRIES:
            for dtype_kv in ("bfloat16", "float8_e4m3fn"):
                heads, kv_heads, head_dim = geometry
                spec = check_spec(head_dim, heads // kv_heads, dtype_kv=dtype_kv)
                for tile in spec.tiles:
                    facts = load(spec).info("causal", tile)
                    report["kernels"][f"{head_dim} {dtype_kv} {tile}"] = facts
                    print(f"  {head_dim} {dtype_kv} tile {tile}: {facts}")
        for requests in (1, 8, 32, 64, 128, 256, 1024):
            report["planner_us"][requests] = planner_time(requests)
        print("planner us:", {k: round(v, 2) for k, v in report["planner_us"].items()}, flush=True)
        torch.cuda.empty_cache()
        Path(args.report).write_text(json.dumps(report))
    if args.tune:
        tune(args, progress)
    else:
        names = [n for n in args.contenders.split(",") if n]
        print(
            f"{'case':44s} {'ours us':>9s} {'% copy':>7s}"
            + "".join(f" {n:>9s} {'ratio':>6s}" for n in names)
            + "  grid chunk",
            flush=True,
        )
        bench(args, report, progress, names)
    torch.cuda.synchronize()
    return 0


class Stopped(Exception):
    """SIGTERM, as from timeout(1): what has been measured is still written."""


def stop(*_) -> None:
    raise Stopped


def supervise(args) -> dict:
    """Starts workers until every case has run, faulted, or the time is over."""
    with tempfile.TemporaryDirectory() as folder:
        rows, progress, report = (Path(folder) / name for name in ("rows", "progress", "report"))
        rows.touch()
        faults, todo = [], args.todo
        while todo and time.time() < args.deadline:
            progress.write_text(json.dumps({"case": -1, "step": "start"}))
            try:
                done = subprocess.run(
                    [
                        sys.executable,
                        __file__,
                        "--worker",
                        "--deadline",
                        str(args.deadline),
                        "--per-case",
                        str(args.per_case),
                        "--contenders",
                        args.contenders,
                        "--match",
                        args.match,
                        "--rows",
                        str(rows),
                        "--progress",
                        str(progress),
                        "--report",
                        str(report),
                        "--todo",
                        ",".join(map(str, todo)),
                        *(["--tune"] if args.tune else []),
                    ],
                    stderr=subprocess.PIPE,
                    text=True,
                )
            except Stopped:
                args.deadline = time.time()
                break
            if done.returncode == 0:
                break
            last = json.loads(progress.read_text())
            case = (
                f"{(tune_cases() if args.tune else spread(cases()))[last['case']]}: "
                if last["case"] >= 0
                else ""
            )
            name = case + last["step"]
            said = [line for line in done.stderr.splitlines() if "Error" in line or "error" in line]
            faults.append(
                {**last, "what": name, "exit": done.returncode, "said": said[-3:], "all": done.stderr[-4000:]}
            )
            print(f"FAULT in {name} (exit {done.returncode}): {' | '.join(said[-1:])}", flush=True)
            if last["case"] < 0:
                break
            todo = todo[todo.index(last["case"]) + 1 :]
        result = json.loads(report.read_text()) if report.exists() else {}
        lines = [json.loads(line) for line in rows.read_text().splitlines()]
        return {
            **result,
            "tune" if args.tune else "cases": lines,
            "faults": faults,
            "stopped_for_time": time.time() >= args.deadline,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="stop starting cases after this time")
    parser.add_argument("--per-case", type=float, default=0.15, help="seconds of replays per case")
    parser.add_argument("--match", default="", help="only cases whose line contains this")
    parser.add_argument(
        "--with",
        "--contenders",
        dest="contenders",
        default="native",
        help=f"columns, of {', '.join(CONTENDERS)}; empty for none",
    )
    parser.add_argument("--tune", action="store_true", help="other choices than the default instead")
    parser.add_argument("--out", default=os.environ.get("OUT", ""), help="folder for bench.json or tune.json")
    for name in ("worker", "deadline", "rows", "progress", "report", "todo"):
        kind = {"action": "store_true"} if name == "worker" else {"default": ""}
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **kind)
    args = parser.parse_args()
    unknown = {n for n in args.contenders.split(",") if n} - CONTENDERS.keys()
    if unknown:
        parser.error(f"unknown contenders {sorted(unknown)}")
    if args.worker:
        args.deadline, args.todo = float(args.deadline), [int(i) for i in args.todo.split(",")]
        return worker(args)
    signal.signal(signal.SIGTERM, stop)
    args.deadline = time.time() + args.seconds
    every = tune_cases() if args.tune else spread(cases())
    args.todo = [i for i, case in enumerate(every) if args.match in str(case)]
    report = supervise(args)
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        (Path(args.out) / ("tune.json" if args.tune else "bench.json")).write_text(
            json.dumps(report, indent=1)
        )
    ratios = [c["ours_us"] / c["native_us"] for c in report.get("cases", []) if "native_us" in c]
    large = [c["share_of_copy"] for c in report.get("cases", []) if c["kv_bytes"] >= 256 * 2**20]
    if ratios:
        print(
            f"ours/native: median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}, "
            f"above 1.03: {sum(r > 1.03 for r in ratios)} of {len(ratios)}"
        )
    if large:
        print(
            f"KV >= 256 MB: median {100 * statistics.median(large):.1f}% of copy, "
            f"least {100 * min(large):.1f}%"
        )
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
