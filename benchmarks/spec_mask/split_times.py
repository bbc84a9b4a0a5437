"""Makes tests/kernels/split_times.json, by which a test measures the planner's choice, from a tune.json.

python benchmarks/spec_mask/split_times.py OUT/tune.json
"""

import json
import sys
from pathlib import Path

TARGET = Path(__file__).parents[2] / "tests/kernels/split_times.json"
WHAT = (
    "One layer's microseconds (attention and merge, graph replay, the grid of a captured shape) by the chunk "
    "size that some constants choose, for the test of the planner's choice"
)
SHAPE = ("geometry", "dtype_kv", "batch", "context", "q_len")


def by_chunk(choice: tuple) -> int:
    return choice[0][1]


def main(path: str) -> None:
    report = json.loads(Path(path).read_text())
    cases: dict[str, dict] = {}
    for row in report["tune"]:
        if row["choice"] != "default" and not row["choice"].startswith("CTA"):
            continue  # another grid: a captured one has places for other lengths
        case = cases.setdefault(
            json.dumps([row[name] for name in SHAPE]),
            {name: row[name] for name in (*SHAPE, "tile_q", "min_chunk", "wave_ctas")} | {"choices": {}},
        )
        choice, us = (row["ctas"], row["chunk"]), round(row["us"], 1)
        case["choices"][choice] = min(us, case["choices"].get(choice, us))
    lines = []
    for case in cases.values():
        choices = [[*choice, us] for choice, us in sorted(case["choices"].items(), key=by_chunk)]
        lines.append(json.dumps({**case, "choices": choices}))
    facts = {"what": WHAT, "command": "python benchmarks/spec_mask/gpu_bench.py --tune", "gpu": report["gpu"]}
    head = json.dumps({**facts, "num_sms": next(iter(report["kernels"].values()))["num_sms"]})
    TARGET.write_text(head[:-1] + ', "cases": [\n' + ", \n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
