"""What every route raises when it cannot serve a builder."""

from __future__ import annotations

from ..patch import Finding


class RouteUnavailable(Exception):
    """This route cannot serve this builder; the next one is tried. Carries the finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding
