"""Prints results of benchmarks/e2e.py side by side: ratios to the first file (in a cell that it lacks, to the
first that has it), and whether tokens are equal.

    python benchmarks/compare.py stock.json patched.json flash_attn.json [--write results.json]

Exits with 1 if tokens differ anywhere by more than rounding (vllm_specpatch/greedy.py), from each other's or
from what prefill makes of them, or a run ended on another route than asked, with 2 if no two results share a
cell. With ``--write`` the results are stored together, without the token lists but with what was compared.
"""

import json
import pathlib
import sys

from vllm_specpatch import greedy


def sampled(a: list[list[int]], b: list[list[int]]) -> str:
    """Of two cells' tokens drawn at random with a seed per request. Rounding may turn any draw."""
    parted = [greedy.parting(ours, theirs) for ours, theirs in zip(a, b, strict=True)]
    at = [i for i in parted if i is not None]
    return f"{len(at)}/{len(parted)} part, the first at {min(at)}" if at else "equal"


def main() -> int:
    arguments = sys.argv[1:]
    target = None
    if "--write" in arguments:
        at = arguments.index("--write")
        target = pathlib.Path(arguments[at + 1])
        del arguments[at : at + 2]
    results = [json.loads(pathlib.Path(path).read_text()) for path in arguments]
    if not all(isinstance(said, dict) for r in results for said in r["tokens"].values()):
        print("results of an older e2e.py, without logprobs; run it again", file=sys.stderr)
        return 2
    base = results[0]
    otherwise = 0
    if any(r.get("weights") == "dummy" for r in results):
        print("vLLM's dummy weights: equal tokens say nothing about attention")
    for r in results:
        print(
            f"{r['name']:24} {r['backend']:10} {r['cudagraph_mode']:18} v2={int(r['v2_runner'])} "
            f"graphs={r['graphs']} init={r['init_s']}s {'; '.join(r['specpatch_log'])[:160]}"
        )
        if r.get("otherwise"):
            otherwise += 1
            print(f"{'':24} {r['otherwise']}")
        for line in r["downgrade"]:
            print(f"{'':24} {line[:130]}")
    print()
    differing = shared = 0
    for cell in dict.fromkeys(cell for r in results for cell in r["cells"]):
        having = [r for r in results if cell in r["cells"]]
        shared += len(having) > 1
        first = having[0]
        for r in having:
            c, reference = r["cells"][cell], first["cells"][cell]
            found = greedy.difference(first["tokens"][cell], r["tokens"][cell], r.get("scale", 1.0))
            # The first one equals itself, which is no comparison.
            same = str(found) if r is not first else None
            c |= {
                "ratio_to_first": round(c["ms_per_step"] / reference["ms_per_step"], 3),
                "tokens_vs_first": same,
            }
            prefill = c.get("by_prefill", {"verdict": "not asked"})
            differing += found.verdict == "differ" or prefill["verdict"] in ("differ", "failed")
            if first is not base:  # it was stopped before this cell
                c["first"] = first["name"]
            print(
                f"{cell:14} {r['name']:24} {c['ms_per_step']:8.3f} ms (spread {c['spread_ms']:.2f}) "
                f"x{c['ms_per_step'] / reference['ms_per_step']:.3f}  tokens {same or '-'}"
            )
            if "text" in prefill:
                print(f"{'':14} {r['name']:24} {prefill['text']}")
            if "sampled" in c and "sampled" in reference:
                c["sampled_vs_first"] = sampled(reference["sampled"], c["sampled"])
                print(f"{'':14} {r['name']:24} sampled tokens: {c['sampled_vs_first']}")
    if target:
        for r in results:
            r.pop("tokens")
            for cell in r["cells"].values():
                cell.pop("sampled", None)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"compared_with": base["name"], "results": results}, indent=1) + "\n")
    return 1 if differing or otherwise else 0 if shared else 2


if __name__ == "__main__":
    sys.exit(main())
