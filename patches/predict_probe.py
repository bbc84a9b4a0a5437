"""Asks the installed vLLM what it does with FlashInfer and speculative decoding. Run in a fresh process.

``python -m vllm_specpatch.patches.predict_probe '{"side": "stock", "gpu": "sm_86", ...}'`` prints one line,
``RESULT`` and a JSON object. Everything that decides is vLLM's: its configuration, its gate
(``get_cudagraph_support``), its metadata builder, and ``resolve_cudagraph_mode_and_sizes``.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import sys
import tempfile
import types
from typing import Any

from . import simulated_gpu

#: A Llama of two layers: big enough for every gate, small enough to need no memory.
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
METHODS = ("eagle", "ngram", "none")
PAGE_SIZE = 16


def write_model(folder: str, name: str, **changes: Any) -> str:
    """A folder with the config.json of a dummy-weight model; returns its path."""
    path = os.path.join(folder, name)
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump({**TINY_MODEL, **changes}, f)
    return path


def engine_config(folder: str, method: str, k: int, kv_cache_dtype: str, **engine_arguments: Any) -> Any:
    """The ``VllmConfig`` of the tiny model on FLASHINFER, made by vLLM's own ``EngineArgs``."""
    from vllm.engine.arg_utils import EngineArgs

    speculative: dict[str, Any] | None = None
    if method == "eagle" and k:
        drafter = write_model(folder, "draft-eagle", num_hidden_layers=1)
        speculative = {"method": "eagle", "model": drafter, "num_speculative_tokens": k}
    elif method == "ngram" and k:
        speculative = {
            "method": "ngram",
            "num_speculative_tokens": k,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 2,
        }
    arguments = {
        "model": write_model(folder, "target"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "kv_cache_dtype": kv_cache_dtype,
        "speculative_config": speculative,
        "attention_backend": "FLASHINFER",
        **engine_arguments,
    }
    return EngineArgs(**arguments).create_engine_config()


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def simulated_device(simulated: bool) -> Any:
    """With a simulated GPU, buffers that layers ask for on "cuda" are made on the CPU."""
    from torch.overrides import TorchFunctionMode

    class CudaToCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    with CudaToCpu() if simulated else contextlib.nullcontext():
        yield


def assume_spec_mask_module() -> None:
    """Nothing is compiled for a simulated GPU, or loaded on it: the answer holds where the module can be had.

    Where it cannot, route ``native`` serves with the same graphs; before FlashInfer 0.6.16 vLLM stays stock.
    """
    from ..kernels import probe, spec_mask
    from . import spec_mask_route

    class PlanOfNothing:
        """What a builder keeps of a plan; nothing is planned here."""

        def __init__(self, *_: Any, **_shape: Any) -> None:
            import torch

            self.partial_o = self.partial_lse = torch.empty(0)

    def load(spec: spec_mask.Spec, **_: Any) -> Any:
        return types.SimpleNamespace(spec=spec)

    for owner, name, stand_in in (
        (spec_mask, "load", load),
        (spec_mask, "Plan", PlanOfNothing),
        (probe, "check", lambda _module: 0),
        (spec_mask_route, "module_is_within_reach", lambda: True),
    ):
        setattr(owner, name, stand_in)


def make_builder(config: Any, kv_cache_dtype: str, device: str) -> tuple[Any, Any]:
    """(kv_cache_spec, metadata builder) of a group of one attention layer. Needs the current vLLM config."""
    import torch
    import vllm.v1.attention.backends.flashinfer as backend
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    model, parallel = config.model_config, config.parallel_config
    spec_arguments: dict[str, Any] = {
        "block_size": PAGE_SIZE,
        "num_kv_heads": model.get_num_kv_heads(parallel),
        "head_size": model.get_head_size(),
        "dtype": model.dtype if kv_cache_dtype == "auto" else torch.uint8,
    }
    with contextlib.suppress(ImportError):  # older releases keep the quantisation mode elsewhere
        from vllm.v1.kv_cache_interface import get_kv_quant_mode

        spec_arguments["kv_quant_mode"] = get_kv_quant_mode(kv_cache_dtype)
    spec = FullAttentionSpec(**spec_arguments)
    layer = f"probe.{len(config.compilation_config.static_forward_context)}.self_attn.attn"
    default = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        Attention(
            model.get_num_attention_heads(parallel),
            spec.head_size,
            scale=spec.head_size**-0.5,
            num_kv_heads=spec.num_kv_heads,
            cache_config=config.cache_config,
            prefix=layer,
        )
    finally:
        torch.set_default_dtype(default)
    return spec, backend.FlashInferMetadataBuilder(spec, [layer], config, torch.device(device))


def probe(options: dict[str, Any]) -> dict[str, Any]:
    """One side of ``vllm-specpatch predict``. Keys of ``options``: side, gpu (None: the real one), k, method,
    kv_cache_dtype, cubins."""
    import vllm_specpatch

    os.environ["VLLM_SPECPATCH"] = (
        "0" if options["side"] == "stock" else os.environ.get("VLLM_SPECPATCH", "auto")
    )
    vllm_specpatch.register()
    simulated = options["gpu"] is not None
    if simulated:
        simulated_gpu.install(*simulated_gpu.parse_capability(options["gpu"]), cubins=options["cubins"])
        assume_spec_mask_module()
    import flashinfer
    import vllm
    import vllm.v1.attention.backends.flashinfer as backend
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability is None:
        raise SystemExit("no CUDA GPU found; pass --gpu, for example --gpu sm_86")
    method, k, kv = options["method"], options["k"], options["kv_cache_dtype"]
    scratch = tempfile.TemporaryDirectory(prefix="specpatch-predict-")
    config = engine_config(scratch.name, method, k, kv)
    with set_current_vllm_config(config), simulated_device(simulated):
        spec, builder = make_builder(config, kv, "cpu" if simulated else "cuda")
        support = backend.FlashInferMetadataBuilder.get_cudagraph_support(config, spec)
        warnings = Warnings()
        compilation_log = logging.getLogger("vllm.config.compilation")
        compilation_log.addHandler(warnings)
        resolve = config.compilation_config.resolve_cudagraph_mode_and_sizes
        arguments = {
            "min_cg_support": support,
            "min_cg_attn_backend": backend.FlashInferBackend.__name__,
            "uniform_decode_query_len": 1 + (k if config.speculative_config else 0),
            "use_v2_model_runner": bool(getattr(config, "use_v2_model_runner", False)),
            "tensor_parallel_size": 1,
        }
        known = inspect.signature(resolve).parameters
        mode = resolve(**{name: value for name, value in arguments.items() if name in known})
        compilation_log.removeHandler(warnings)
    scratch.cleanup()
    result = {
        "vllm": vllm.__version__,
        "flashinfer": flashinfer.__version__,
        "gpu": f"sm_{capability.major}{capability.minor}",
        "support": support.name,
        "reorder_batch_threshold": builder.reorder_batch_threshold,
        "cudagraph_mode": mode.name,
        "warnings": warnings.lines,
    }
    if options["side"] == "patched":
        status = vllm_specpatch.status()
        patches = status["patches"]
        result["error"] = status["error"]
        result["imported"] = {name: patch["state"] for name, patch in patches.items()}
        states = {name: _effective(patch) for name, patch in patches.items()}
        result["patches"] = {name: state["state"] for name, state in states.items()}
        result["reasons"] = {name: state["reason"] for name, state in states.items()}
        result["route"] = next((s["route"] for s in states.values() if s.get("route")), "stock")
    return result


def _effective(patch: dict[str, Any]) -> dict[str, Any]:
    """The last decision about a configuration, or the import-time verdict where there was none."""
    return {**patch, **(patch["decisions"][-1] if patch["decisions"] else {})}


def main() -> None:
    print("RESULT " + json.dumps(probe(json.loads(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
