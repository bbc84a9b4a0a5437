"""Mixed traffic on one engine for minutes: arrivals, aborts, shared prefixes, a KV cache too small for all.

    python benchmarks/soak.py stock seconds=120 json=stock.json            # with VLLM_SPECPATCH=0
    python benchmarks/soak.py patched seconds=480 json=patched.json
    python benchmarks/soak.py --compare stock.json patched.json

What arrives and what is aborted depends on the number of the engine step only, so the same requests meet the
same batches in every run, however fast it is; a request that both runs finished must have the same greedy
tokens, or part where rounding may (vllm_specpatch/greedy.py). Other keys as in e2e.py (k, accept, kv, async,
fa, layers); max_num_seqs is 32, gpu_gib 1.5 (about 43,000 tokens).
"""

import hashlib
import importlib.util
import json
import os
import pathlib
import random
import resource
import sys
import time

from vllm_specpatch import greedy, random_weights

MAX_SEQS, CONTEXT = 32, 8192
SAMPLE_S = 15


class Traffic:
    """What happens before each step; the same for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._prefixes: list[list[int]] = []
        self._next = 0

    def _prompt(self) -> list[int]:
        source = self._random
        kind = source.random()
        length = source.randint(1, 40) if kind < 0.2 else source.randint(100, 1500 if kind < 0.8 else 6000)
        tokens = [source.randrange(3, 32000) for _ in range(length)]
        if self._prefixes and source.random() < 0.4:
            # A hit of any length modulo the page.
            shared = source.choice(self._prefixes)
            tokens[: source.randint(1, len(shared))] = shared[: len(tokens)]
            tokens = tokens[:6000]
        if length > 100 and len(self._prefixes) < 40:
            self._prefixes.append(tokens)
        return tokens

    def arrivals(self, running: int) -> list[tuple[str, list[int], int]]:
        """(id, prompt, tokens to generate) of the requests that come now; more wait than may run at times."""
        source = self._random
        wanted = source.choice((0, 0, 0, 0, 1, 1, 2, 5)) if running < 2 * MAX_SEQS else 0
        found = []
        for _ in range(wanted):
            found.append((f"r{self._next}", self._prompt(), source.randint(4, 250)))
            self._next += 1
        return found

    def aborts(self, ids: list[str]) -> list[str]:
        return [self._random.choice(ids)] if ids and self._random.random() < 0.02 else []


def drive(engine, sampling, seconds: float, most_steps: int, sample, synthetic: bool) -> dict:
    """Runs the traffic. ``sampling(n)`` makes parameters for n tokens; ``sample()`` measures memory;
    ``synthetic``: drafts are accepted unseen."""
    traffic, alive, tokens, aborted, samples = Traffic(), {}, {}, 0, []
    started = time.perf_counter()
    step, next_sample, finished_at = 0, 0.0, {}
    while True:
        elapsed = time.perf_counter() - started
        if elapsed >= next_sample:
            samples.append({"seconds": round(elapsed, 1), "step": step, **sample()})
            next_sample += SAMPLE_S
        stop = elapsed >= seconds or (most_steps and step >= most_steps)
        if stop and not alive:
            break
        if not stop:
            for name, prompt, out in traffic.arrivals(len(alive)):
                engine.add_request(name, {"prompt_token_ids": prompt}, sampling(out))
                alive[name] = out
            for name in traffic.aborts(sorted(alive)):
                engine.abort_request([name])
                del alive[name]
                aborted += 1
        for output in engine.step():
            if output.finished and output.request_id in alive:
                said, wanted = greedy.said(output.outputs, synthetic), alive.pop(output.request_id)
                [ids] = said["ids"]
                assert len(ids) == wanted, f"{output.request_id}: {len(ids)} tokens, {wanted} were asked for"
                tokens[output.request_id], finished_at[output.request_id] = said, step
        step += 1
    samples.append({"seconds": round(time.perf_counter() - started, 1), "step": step, **sample()})
    return {
        "steps": step,
        "seconds": round(time.perf_counter() - started, 1),
        "finished": len(tokens),
        "aborted": aborted,
        "generated": sum(len(said["ids"][0]) for said in tokens.values()),
        "memory": samples,
        "finished_at": finished_at,
        "tokens": tokens,
    }


def together(tokens: dict, names: list[str]) -> dict:
    """What these requests said, as of one batch (:mod:`vllm_specpatch.greedy`)."""
    said = [tokens[name] for name in names]
    lists = {key: [one[key][0] for one in said] for key in said[0] if key != "synthetic"}
    return {**lists, "synthetic": all(one["synthetic"] for one in said)}


def compare(first: str, second: str) -> int:
    a, b = (json.loads(pathlib.Path(path).read_text()) for path in (first, second))
    both = [name for name in a["tokens"] if name in b["tokens"]]
    if not both:
        print("no request finished in both")
        return 2
    sides = [together(result["tokens"], both) for result in (a, b)]
    found = greedy.difference(*sides)
    print(f"{len(both)} requests finished in both, {sum(map(len, sides[0]['ids']))} tokens: {found}")
    for result in (a, b):
        # The second sample: by then every shape has been seen.
        then, now = result["memory"][1], result["memory"][-1]
        print(
            f"{result['name']}: {result['steps']} steps, {result['finished']} finished, "
            f"{result['aborted']} aborted, GPU memory {then['allocated_mib']:.0f} -> "
            f"{now['allocated_mib']:.0f} MiB, host peak {then['rss_mib']:.0f} -> {now['rss_mib']:.0f} MiB"
        )
    return 1 if found.verdict == "differ" else 0


def main() -> int:
    if sys.argv[1] == "--compare":
        return compare(*sys.argv[2:4])
    name = sys.argv[1]
    options = {"k": "7", "gpu_gib": "1.5", "accept": "3", **dict(a.split("=", 1) for a in sys.argv[2:])}
    # By path: this folder must not be on sys.path (python -P).
    spec = importlib.util.spec_from_file_location("e2e", pathlib.Path(__file__).with_name("e2e.py"))
    assert spec is not None and spec.loader is not None
    e2e = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(e2e)

    import torch
    from vllm import SamplingParams

    llm = e2e.make_llm(
        options.get("backend", "FLASHINFER"),
        options,
        [CONTEXT],
        [MAX_SEQS],
        300,
        enable_prefix_caching=True,
        max_num_batched_tokens=2048,
    )

    llm.llm_engine.collective_rpc(random_weights.fill_models)

    def sampling(tokens):
        return SamplingParams(
            temperature=0, logprobs=greedy.LOGPROBS, max_tokens=tokens, ignore_eos=True, detokenize=False
        )

    def sample():
        return {
            "allocated_mib": torch.cuda.memory_allocated() / 2**20,
            "reserved_mib": torch.cuda.memory_reserved() / 2**20,
            "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }

    result = drive(
        llm.llm_engine,
        sampling,
        float(options.get("seconds", 480)),
        int(options.get("steps", 0)),
        sample,
        synthetic=int(options["k"]) > 0 and "accept" in options,
    )
    text = json.dumps(sorted((name, said["ids"][0]) for name, said in result["tokens"].items()))
    result = {
        "name": name,
        "options": options,
        "command": "python benchmarks/soak.py " + " ".join(sys.argv[1:]),
        "environment": {key: v for key, v in os.environ.items() if key.startswith("VLLM_")},
        "gpu": torch.cuda.get_device_name(),
        "tokens_sha256": hashlib.sha256(text.encode()).hexdigest()[:16],
        **result,
    }
    if "json" in options:
        pathlib.Path(options["json"]).write_text(json.dumps(result))
    print("RESULT " + json.dumps({k: v for k, v in result.items() if k not in ("tokens", "finished_at")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
