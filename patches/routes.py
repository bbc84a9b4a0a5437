"""Who serves multi-token decodes. The candidates are fixed before CUDA-graph support is promised.

A route is an object per metadata builder. Whether a route can serve at all is asked without side effects
(:meth:`Route.why_not`); making one for a builder may still fail (a module that does not compile), and then
the next candidate is tried. Graphs are only promised if the last candidate cannot fail that way.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..patch import Finding
from .native import NativeRoute
from .routes_base import RouteUnavailable
from .spec_mask_route import SpecMaskRoute


class Route(Protocol):
    """What the FlashInfer patch asks of a route."""

    name: str
    #: True: ``build(common, stock_build, capturing)`` makes the metadata of batches whose ``causal`` it
    #: ``serves``; ``stock(build)`` calls vLLM's own for the others; ``update_draft_decode_metadata`` is
    #: optional.
    #: False: vLLM's ``build()`` runs and asks for ``decode_wrapper(requests, q_len, graph)`` and
    #: ``plan(wrapper, arguments of fast_plan_decode by name)`` (see :class:`.native.NativeRoute`).
    builds: bool
    #: Whether it can serve blocks in which every row sees every other (drafts of DFlash).
    non_causal: bool

    @classmethod
    def why_not(cls) -> Finding | None:
        """None if this route can serve on this machine; otherwise why not. No side effects."""

    @classmethod
    def prepare(cls, vllm_config: Any, flashinfer_backend: Any, max_q_len: int) -> Finding | None:
        """Makes ready what the builders of a model will need, before graphs are promised for it. None, or why
        this route cannot serve some layer of it. ``max_q_len``: rows of the longest decode."""

    def __init__(self, builder: Any, flashinfer_backend: Any) -> None:
        """``builder``: the ``FlashInferMetadataBuilder``, its threshold set; ``flashinfer_backend``: its
        vLLM module. Raises :class:`.routes_base.RouteUnavailable`."""


ROUTES: dict[str, type[Route]] = {"spec_mask": SpecMaskRoute, "native": NativeRoute}

#: What ``auto`` tries, best first.
AUTO = ("spec_mask", "native")


def candidates(wanted: str) -> list[type[Route]] | Finding:
    """The routes to try for ``VLLM_SPECPATCH_ROUTE=wanted``, in order, or why none can serve."""
    refusal = None
    found: list[type[Route]] = []
    for name in AUTO if wanted == "auto" else (wanted,):
        refusal = ROUTES[name].why_not()
        if refusal is None:
            found.append(ROUTES[name])
    if found:
        return found
    assert refusal is not None
    return refusal


def make(routes: list[type[Route]], builder: Any, flashinfer_backend: Any) -> tuple[Route, list[Finding]]:
    """The first route that can be made for a builder, and why the better ones could not.

    Raises :class:`.routes_base.RouteUnavailable` if none can.
    """
    refusals: list[Finding] = []
    for route in routes:
        try:
            return route(builder, flashinfer_backend), refusals
        except RouteUnavailable as e:
            refusals.append(e.finding)
    raise RouteUnavailable(refusals[-1])
