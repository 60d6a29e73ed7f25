"""Simulated time: a heap of (time, number, action). Of actions due at once, the first asked for is the first done."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

Action = Callable[[], None]


@dataclass(slots=True)
class Clock:
    """`now` in seconds. An action that raises ends the run."""

    now: float = 0.0
    _due: list[tuple[float, int, Action]] = field(default_factory=list)
    _asked: int = 0

    def at(self, when_s: float, action: Action) -> None:
        """Do it then, or now where that is past."""
        self._asked += 1
        heapq.heappush(self._due, (max(when_s, self.now), self._asked, action))

    def run(self) -> None:
        """Until nothing is due any more."""
        due = self._due
        while due:
            self.now, _, action = heapq.heappop(due)
            action()
