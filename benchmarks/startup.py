"""What the start-up hook costs a Python that never imports vLLM: the median over fresh processes.

    python benchmarks/startup.py [PROCESSES]      # run with the Python that has the package installed

Times the exact line of vllm_specpatch.pth inside each process, from nothing of ours imported.
"""

import json
import pathlib
import statistics
import subprocess
import sys

PROBE = """
import sys, time
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "VllmWatcher"]
for name in [m for m in sys.modules if m.split(".")[0] == "vllm_specpatch"]:
    del sys.modules[name]
line = open(sys.argv[1]).read()
start = time.perf_counter()
exec(line)
print(time.perf_counter() - start)
"""


def main() -> None:
    import vllm_specpatch

    line = pathlib.Path(vllm_specpatch.__file__).parent / "startup" / "vllm_specpatch.pth"
    times = []
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 40):
        done = subprocess.run([sys.executable, "-c", PROBE, line], capture_output=True, text=True, check=True)
        times.append(float(done.stdout) * 1e3)
    result = {"ms_median": statistics.median(times), "ms_max": max(times), "processes": len(times)}
    print(json.dumps({k: round(v, 3) for k, v in result.items()} | {"python": sys.version.split()[0]}))


if __name__ == "__main__":
    main()
