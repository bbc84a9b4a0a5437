"""What every route shares: why it cannot serve a builder, and which shapes a builder's graphs hold."""

from __future__ import annotations

from ..patch import Finding


class RouteUnavailable(Exception):
    """This route cannot serve this builder; the next one is tried. Carries the finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class CapturedShapes:
    """The shapes that the CUDA graphs of one builder were captured with, as its route keys them.

    Only captured shapes replay. Without this every other shape that traffic brings would get a persistent
    wrapper or plan and its workspace, and memory would grow for hours.
    """

    def __init__(self) -> None:
        self.capturing = False
        self._shapes: set[tuple[int, int]] = set()

    def use_graph(self, shape: tuple[int, int], possible: bool) -> bool:
        """Whether the batch is one that graphs are replayed for; a batch being captured becomes one.

        ``possible``: vLLM's own conditions (graphs on, decodes only, under the capture cap) hold.
        """
        if possible and self.capturing:
            self._shapes.add(shape)
        return possible and shape in self._shapes
