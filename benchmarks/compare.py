"""Prints results of benchmarks/e2e.py side by side: ratios to the first file (in a cell that it lacks, to the
first that has it), and whether tokens are equal.

    python benchmarks/compare.py stock.json patched.json flash_attn.json [--write results.json]

Exits with 1 if tokens differ anywhere, with 2 if no two results share a cell. With ``--write`` the results
are stored together, without the token lists but with what was compared.
"""

import json
import pathlib
import sys

#: What rounding may do: two engines that add in another order differ by some units of bf16 in a logit of 4.
NEAR = 0.1
#: As far as requests must agree on average before they part for that. A wrong attention parts at once.
AGREED = 8


def first_difference(a: list[list[int]], b: list[list[int]], gaps: list[list[float]] | None = None) -> str:
    """How the token lists of two runs differ. ``gaps``: by how much each token of ``a`` was ahead of the next
    best, in logprob; with them, requests that part where that is little only "part by rounding"."""
    rows = [
        (next((i for i, (x, y) in enumerate(zip(r, s, strict=True)) if x != y), -1))
        for r, s in zip(a, b, strict=True)
    ]
    differing = [i for i in rows if i >= 0]
    if not differing:
        return "equal"
    if gaps is not None:
        widest = max(gaps[row][i] for row, i in enumerate(rows) if i >= 0)
        agreed = sum(i if i >= 0 else len(r) for i, r in zip(rows, a, strict=True)) / len(rows)
        if widest <= NEAR and agreed >= min(AGREED, len(a[0]) / 2):
            return f"{len(differing)}/{len(rows)} part by rounding (at most {widest:.3f}), after {agreed:.0f}"
    return f"{len(differing)}/{len(rows)} differ from token {min(differing)}"


def sampled(a: dict, b: dict) -> str:
    """Of two cells: whether sampled tokens are equal, and how far logprobs of equal greedy tokens differ."""
    largest = 0.0
    for rows in zip(a["greedy"], b["greedy"], a["logprobs"], b["logprobs"], strict=True):
        for x, y, p, q in zip(*rows, strict=True):
            if x != y:
                break
            largest = max(largest, abs(p - q))
    return f"sampled {first_difference(a['sampled'], b['sampled'])}, logprobs within {largest:.4f}"


def main() -> int:
    arguments = sys.argv[1:]
    target = None
    if "--write" in arguments:
        at = arguments.index("--write")
        target = pathlib.Path(arguments[at + 1])
        del arguments[at : at + 2]
    results = [json.loads(pathlib.Path(path).read_text()) for path in arguments]
    base = results[0]
    for r in results:
        print(
            f"{r['name']:24} {r['backend']:10} {r['cudagraph_mode']:18} v2={int(r['v2_runner'])} "
            f"graphs={r['graphs']} init={r['init_s']}s {'; '.join(r['specpatch_log'])[:160]}"
        )
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
            same = first_difference(first["tokens"][cell], r["tokens"][cell], first.get("gaps", {}).get(cell))
            c |= {
                "ratio_to_first": round(c["ms_per_step"] / reference["ms_per_step"], 3),
                "tokens_vs_first": same,
            }
            differing += " differ " in same
            if first is not base:  # it was stopped before this cell
                c["first"] = first["name"]
            print(
                f"{cell:14} {r['name']:24} {c['ms_per_step']:8.3f} ms (spread {c['spread_ms']:.2f}) "
                f"x{c['ms_per_step'] / reference['ms_per_step']:.3f}  tokens {same}"
            )
            if "sampled" in c and "sampled" in reference:
                c["sampled_vs_first"] = sampled(reference, c)
                print(f"{'':14} {r['name']:24} {c['sampled_vs_first']}")
    if target:
        for r in results:
            r.pop("tokens")
            r.pop("gaps", None)
            for cell in r["cells"].values():
                for lists in ("sampled", "greedy", "logprobs"):
                    cell.pop(lists, None)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({"compared_with": base["name"], "results": results}, indent=1) + "\n")
    return 1 if differing else 0 if shared else 2


if __name__ == "__main__":
    sys.exit(main())
