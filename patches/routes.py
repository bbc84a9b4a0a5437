"""Who serves multi-token decodes. Chosen once per configuration, before CUDA-graph support is promised.

The seam for further routes: add a module with a :class:`Route` and name it in :data:`ROUTES`, best first.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..patch import Finding, State
from .native import NativeRoute


class Route(Protocol):
    """What the FlashInfer patch asks of a route. One instance per metadata builder."""

    name: str

    @classmethod
    def why_not(cls) -> Finding | None:
        """None if this route can serve on this machine; otherwise why not. No side effects."""

    def __init__(self, builder: Any, flashinfer_backend: Any) -> None:
        """``builder``: the ``FlashInferMetadataBuilder``; ``flashinfer_backend``: its vLLM module."""

    def decode_wrapper(self, num_requests: int, q_len: int, graph: bool) -> Any:
        """The object that ``FIDecode.wrapper`` gets for ``num_requests`` decodes of ``q_len`` rows each.

        It has ``run()`` and the attributes that ``FlashInferImpl.forward`` asserts on. With ``graph`` the
        same object must come back for the same shape: captured graphs hold its buffers.
        """

    def plan(self, wrapper: Any, plan_arguments: dict[str, Any]) -> None:
        """Plans the step; ``plan_arguments`` are those of vLLM's ``fast_plan_decode`` by name."""


ROUTES: dict[str, type[Route]] = {"native": NativeRoute}


def choose(wanted: str) -> type[Route] | Finding:
    """The route for ``VLLM_SPECPATCH_ROUTE=wanted``, or why none can serve."""
    if wanted != "auto" and wanted not in ROUTES:
        return Finding(
            State.REFUSED,
            f"this version has no route {wanted!r}",
            wanted=f"VLLM_SPECPATCH_ROUTE=auto or {', '.join(ROUTES)}",
            found=wanted,
            next_step="unset VLLM_SPECPATCH_ROUTE",
        )
    refusal = None
    for name, route in ROUTES.items():
        if wanted in ("auto", name):
            refusal = route.why_not()
            if refusal is None:
                return route
    assert refusal is not None
    return refusal
