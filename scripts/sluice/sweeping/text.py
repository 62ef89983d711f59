"""Numbers and tables for people."""

from __future__ import annotations

import math
import shutil
import sys
import time
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from ..reporting.values import short

if TYPE_CHECKING:
    from .runner import Running
    from .sweep_file import Trial


def count(value: float) -> str:
    """1.67M; below 1,000 a whole number"""
    return short(value, giga="B") if abs(value) >= 999.5 else f"{value:.0f}"


def duration(seconds: float) -> str:
    seconds = int(math.ceil(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 100 * 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds / 86400:.0f} days"


def unprintable(text: str) -> bool:
    """Whether a text has a control character, a separator of lines or paragraphs, or what is no UTF-8."""
    return any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in text)


def finite(value: Any) -> float | None:
    """A finite number, or None: writers put null where a value was not finite."""
    return (
        float(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )


def fixed(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(header: Sequence[object], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Columns as wide as they must be; the first `left` flush left."""
    lines = [header, *rows]
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(header))]
    out = []
    for line in lines:
        cells = [
            str(c).ljust(w) if i < left else str(c).rjust(w) for i, (c, w) in enumerate(zip(line, widths))
        ]
        out.append("  ".join(cells).rstrip())
    return "\n".join(out)


class Display:
    """On a terminal a rewritten line for each running trial; elsewhere plain lines, those of progress every `every` seconds."""

    def __init__(self, every: float, stream: TextIO = sys.stdout) -> None:
        self.every, self.stream = every, stream
        self.rewrite = stream.isatty()
        self.lines, self.last = 0, time.monotonic()
        self.said: set[int] = set()

    def say(self, text: str, once: object = None) -> None:
        if once is not None and id(once) in self.said:
            return
        self.said.add(id(once))
        self.wipe()
        print(f"sweep: {text}", file=self.stream, flush=True)

    def event(self, trial: Trial, text: str) -> None:
        self.wipe()
        print(f"{trial.name}  {text}", file=self.stream, flush=True)

    def wipe(self) -> None:
        if self.lines:
            self.stream.write(f"\x1b[{self.lines}A\x1b[J")
            self.lines = 0

    @staticmethod
    def line(running: Running) -> str:
        record, plan = running.last, running.trial.plan
        if not record:
            return f"{running.trial.name}  starting"
        speed = finite(record.get("tokens_per_second")) or 0
        left = (plan["tokens"] - record.get("tokens", 0)) / speed if speed else 0
        return (
            f"{running.trial.name}  step {record['step']}/{plan['steps']}  loss {fixed(finite(record.get('loss')), 3)}  "
            f"{count(speed)} tok/s  ETA {duration(left)}"
        )

    def refresh(self, running: dict[int | None, Running]) -> None:
        now = time.monotonic()
        if now - self.last < (0.3 if self.rewrite else self.every):
            return
        self.last = now
        self.wipe()
        lines = [self.line(r) for r in running.values()]
        if self.rewrite:
            size = shutil.get_terminal_size()
            lines = [text[: size.columns - 1] for text in lines[: max(1, size.lines - 2)]]
            self.lines = len(lines)
        for text in lines:
            print(text, file=self.stream)
        self.stream.flush()
