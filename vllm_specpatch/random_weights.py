"""Weights for dummy models with which tokens depend on attention. Imports torch when it is called.

vLLM's own dummy weights are uniform up to 0.001 (``model_loader/weight_utils.py``,
``initialize_dummy_weights``), norms included: attention's output is then 1e-5 of the embedding that it is
added to and is rounded away, whatever it is. An engine with a wrong attention says the same tokens.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

from . import bench_probe

#: Queries, keys and values are larger by this, so that scores spread (2.25 instead of 1) and attention looks
#: at some tokens among thousands. On a model of 8 layers and 512 tokens, one page of 16 left out moved
#: logprobs by 0.10 on average and tokens at once; another rounding of the same attention moved them by 0.01.
#: At 8192 tokens a page moves them by about 0.01 only: there a comparison sees an eighth of the context left
#: out (0.12), not a page.
PEAKED = 1.5
ATTENTION_INPUT = re.compile(r"\b(?:qkv|q|k|v)_proj\b")


def fill_weights(model: Any, seed: int) -> int:
    """Gives a model random weights; returns how many parameters were set.

    In place, so that captured graphs see them. Norms are 1, embeddings N(0, 1) and matrices N(0, 1 / inputs),
    as at the start of a training, those of queries, keys and values :data:`PEAKED` times as large. A
    parameter's values depend on its name, the seed and, where ranks hold parts of it, on the rank.
    """
    import torch

    done = set()
    # A loader may have made its tensors in inference mode: they can be written there only.
    with torch.inference_mode():
        modules = dict(model.named_modules())
        for name, weight in model.named_parameters():
            if weight.data_ptr() in done or not weight.is_floating_point():
                continue
            done.add(weight.data_ptr())  # a drafter may share the target's embedding
            if weight.dim() < 2:
                weight.data.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            ranks, rank, inputs = _shard(modules[name.rpartition(".")[0]])
            scale = 1.0 if "embed" in name else (weight.shape[-1] * inputs) ** -0.5
            scale *= PEAKED if ATTENTION_INPUT.search(name) else 1.0
            # Equal parts on all ranks would make every token as good as another one.
            own = f"{name} {rank}/{ranks}" if ranks > 1 else name
            source = torch.Generator(weight.device).manual_seed(seed ^ zlib.crc32(own.encode()))
            for rows in weight.data.split(4096):  # fp32 of a whole embedding would take half a GiB
                rows.copy_(torch.randn(rows.shape, generator=source, device=weight.device) * scale)
        _renew_copies(model)
    return len(done)


def _shard(module: Any) -> tuple[int, int, int]:
    """(ranks that share this layer's weights, this one, ranks that share its inputs), by vLLM's classes."""
    kind = type(module).__name__
    if "Parallel" not in kind:
        return 1, 0, 1
    ranks, rank = getattr(module, "tp_size", 1), getattr(module, "tp_rank", 0)
    return ranks, rank, ranks if "Row" in kind else 1


def _renew_copies(model: Any) -> None:
    """DFlash drafters keep their layers' K and V weights in one tensor (models/qwen3_dflash.py), which is
    made at the first dummy run: written in place, in case a graph has its address."""
    for module in model.modules():
        build = getattr(module, "_build_fused_kv_buffers", None)
        copies = ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights")
        old = {name: getattr(module, name) for name in copies if getattr(module, name, None) is not None}
        if build is None or not old:
            continue
        build()
        for name, tensor in old.items():
            tensor.copy_(getattr(module, name))
            setattr(module, name, tensor)


def fill_models(worker: Any, same: bool = False) -> int:
    """Target and drafter of one worker, through ``collective_rpc``; the drafter first, since it may share
    weights with the target. ``same``: a drafter that is the target's model gets its weights too. Raises
    ``RuntimeError`` if the target is not found: with vLLM's dummy weights all engines say the same."""
    runner = bench_probe.runner_of(worker)
    models = [getattr(bench_probe.drafter_of(runner), "model", None), getattr(runner, "model", None)]
    filled = [
        fill_weights(model, 2 if same else 1 + i) if hasattr(model, "named_parameters") else 0
        for i, model in enumerate(models)
    ]
    if not filled[-1]:
        raise RuntimeError(f"no weights of the target model found in {type(runner).__name__}")
    return sum(filled)
