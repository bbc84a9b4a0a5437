"""Asks one vLLM release, ahead on PYTHONPATH, about many simulated GPUs; run by test_matrix.py as a program.

``probe_release.py '[["stock", 3, "8.6", false], ...]'`` takes (side, k, capability, cubins) and prints an
answer a line: ``{"result": what predict_probe.probe returns}`` or ``{"error": traceback}``. Side ``source``
is ``patched`` with both doors shut: only a vLLM whose own source calls us is patched then. What takes
seconds to import and knows no GPU (torch, transformers, FlashInfer) is imported once; each question is then
put to a forked child, because vLLM decides about its platform once per process, while it is imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
from typing import Any

#: Imported before the forks. Nothing of vLLM: what its modules are depends on the platform.
SHARED = (
    "torch.distributed",
    "torch._inductor.compile_fx",
    "transformers.models.auto.modeling_auto",
    "transformers.processing_utils",
    "aiohttp",
    "fastapi",
    "openai.types.chat",
    "zmq",
    "flashinfer.decode",
    "flashinfer.prefill",
)


def ask(side: str, k: int, capability: str, cubins: bool) -> dict[str, Any]:
    import vllm_specpatch
    from vllm_specpatch.patches import predict_probe

    if side == "source":
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "VllmWatcher"]
        vllm_specpatch.register = lambda: None
    options = {"side": "stock" if side == "stock" else "patched", "gpu": capability, "cubins": cubins}
    result = predict_probe.probe({**options, "k": k, "method": "eagle", "kv_cache_dtype": "auto"})
    return {**result, "doors": vllm_specpatch.status()["doors"]}


def in_a_child(*question: Any) -> dict[str, Any]:
    """The answer of a forked process, or its traceback."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read_end)
            os.dup2(2, 1)  # vLLM logs to stdout, which carries our answers
            try:
                answer = {"result": ask(*question)}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            with os.fdopen(write_end, "w") as pipe:
                json.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said) if said else {"error": "the child died without a word"}


def main() -> None:
    questions = json.loads(sys.argv[1])
    # As vLLM sets it when imported: no pool of compile processes, started by an import and then forked.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with contextlib.redirect_stdout(sys.stderr):
        for name in SHARED:
            importlib.import_module(name)
    gc.freeze()  # or the first collection in each child copies every page of what is shared
    for question in questions:
        print(json.dumps(in_a_child(*question)), flush=True)


if __name__ == "__main__":
    main()
