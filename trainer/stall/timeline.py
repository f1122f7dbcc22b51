"""The latest segments of device time one by one, as a trace that Perfetto and Chrome open."""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.trainer.config.run_config import TRACE_FILE
from tokenfeed.trainer.stall.causes import Phase

__all__ = ["Timeline"]


_MOST = 20_000
_DEVICE, _STEPS = 1, 2
_TRACKS = {_DEVICE: "device: work, and what it waited for", _STEPS: "steps"}


class Timeline:
    """Keeps the latest segments: some megabytes."""

    def __init__(self) -> None:
        self._segments: deque[tuple[str, float, float]] = deque(maxlen=_MOST)
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=_MOST)
        self._step_started = 0.0

    def add(self, phase: Phase, start_s: float, end_s: float) -> None:
        """A segment of device time; they come in order and tile it."""
        if end_s > start_s:
            self._segments.append((phase, start_s, end_s))

    def end_step(self, tokens: int, end_s: float) -> None:
        """A step of so many real tokens ended with the segment before."""
        self._steps.append((tokens, self._step_started, end_s))
        self._step_started = end_s

    def write(self, folder: Path) -> Path:
        """Write trace.json into a folder, atomically."""
        steps = ((f"{tokens:,} tokens", start, end) for tokens, start, end in self._steps)
        events = [*_names(), *_events(_DEVICE, self._segments), *_events(_STEPS, steps)]
        content = {"traceEvents": events, "displayTimeUnit": "ms"}
        path = folder / TRACE_FILE
        atomic_write(path, json.dumps(content).encode())
        return path


def _names() -> Iterator[dict[str, Any]]:
    for track, name in _TRACKS.items():
        yield {
            "name": "thread_name",
            "ph": "M",
            "pid": 1,
            "tid": track,
            "args": {"name": name},
        }


def _events(track: int, kept: Iterable[tuple[str, float, float]]) -> Iterator[dict[str, Any]]:
    """Complete events; times are microseconds."""
    for name, start_s, end_s in kept:
        yield {
            "name": name,
            "ph": "X",
            "pid": 1,
            "tid": track,
            "ts": round(start_s * 1e6, 3),
            "dur": round((end_s - start_s) * 1e6, 3),
        }
