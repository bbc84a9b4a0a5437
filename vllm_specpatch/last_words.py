"""Why a process ended without a result: the line of its output that says so."""

from __future__ import annotations

import re

#: The end of a traceback, also behind a rank or in a line of vLLM's log.
EXCEPTION = re.compile(
    r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Refused|SystemExit)(?::(?: .*)?)?)$"
)
#: What may be said after the cause: log lines, torch's farewell, an exception that names another one.
NO_CAUSE = re.compile(r"\b(?:INFO|WARNING|Warning)\b|See root cause above")
#: No part of an exception's text either: the next traceback, what has a rank or a process in front.
NEXT = re.compile(r"Traceback |\[|\(")
#: Advice of pydantic and of CUDA, which crowds the cause out of one line.
ADVICE = (
    "For further information",
    "CUDA kernel errors might",
    "For debugging consider",
    "Compile with `TORCH_USE_CUDA_DSA`",
    "Search for `cudaError",
)
LONGEST = 500


class LastWords:
    """The last exception, with the lines that belong to it (pydantic says below it what was wrong), or the
    last line.

    torch's and vLLM's own farewells come after the exception ("destroy_process_group() was not called")."""

    def __init__(self) -> None:
        self._exception: list[str] = []
        self._line = ""
        self._open = False

    def hear(self, line: str) -> None:
        line = line.strip()
        if line.startswith(ADVICE):
            return
        self._line = line or self._line
        if not line or NO_CAUSE.search(line):
            self._open = False
            return
        found = EXCEPTION.search(line)
        if found:
            self._exception = [found[1]]
            # One within a log line has its text in that line: what comes below is somebody else's.
            self._open = found[1] == line
        elif NEXT.match(line):
            self._open = False
        elif self._open:
            self._exception.append(line)

    def __str__(self) -> str:
        return (" ".join(self._exception) or self._line)[:LONGEST]


def last_words(output: str) -> str:
    """:class:`LastWords` of a whole output."""
    said = LastWords()
    for line in output.splitlines():
        said.hear(line)
    return str(said)
