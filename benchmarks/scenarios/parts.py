"""The optimizations that benchmarks/scenarios/ measures one by one, by name."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scenarios import counted, ladder, simulated
from benchmarks.scenarios import data as scenarios_data
from benchmarks.scenarios.case import SCENARIOS, SIDES

__all__ = ["PARTS", "Part"]

Entry = dict[str, Any]

DEVICE_STEPS = 40
"""Steps beside the simulated device that count."""
LADDER_ROWS = 1200
ACCUMULATED_ROWS, ACCUMULATED_STEPS = 32, 40
SAVE_EVERY = 5, 50
SAVING_STEPS = 100


@dataclass(frozen=True, slots=True)
class Part:
    """How one optimization is measured.

    `measure` takes the folder of the data and a seed, and yields an entry per case. Counted parts
    have the same figures in every round.
    """

    measure: Callable[[Path, int], Iterator[Entry]]
    is_timed: bool = True


def _idle(folder: Path, seed: int) -> Iterator[Entry]:
    yield from simulated.measure_idle(scenarios_data.make("modules", folder), DEVICE_STEPS)


def _workers(folder: Path, seed: int) -> Iterator[Entry]:
    yield from simulated.measure_workers(scenarios_data.make("modules", folder), DEVICE_STEPS)


def _ladder(folder: Path, seed: int) -> Iterator[Entry]:
    data = scenarios_data.make("docstrings", folder)
    for rung in (*(each.said for each in ladder.RUNGS), ladder.LAST):
        yield {"rung": rung, **ladder.climb(data, rung, LADDER_ROWS, seed)}


def _memory(folder: Path, seed: int) -> Iterator[Entry]:
    yield from counted.by_batch(folder)


def _precision(folder: Path, seed: int) -> Iterator[Entry]:
    yield from counted.by_precision(folder)


def _accumulation(folder: Path, seed: int) -> Iterator[Entry]:
    """Yield counted bytes of BERT-base, and the time and loss of the small model on a CPU."""
    like = SCENARIOS["d"]
    data = scenarios_data.make(like.data, folder)
    for entry in counted.accumulated(folder):
        size = ACCUMULATED_ROWS * 128 // entry["micro_batches"]
        scenario = dataclasses.replace(
            like,
            loop=dataclasses.replace(like.loop, rows=ACCUMULATED_ROWS),
            steps=ACCUMULATED_STEPS,
            settings=like.settings | {"step_rows": ACCUMULATED_ROWS, "micro_batch_tokens": size},
        )
        outcome = SIDES["after"](scenario, data, seed)
        ms = 1e3 / outcome.marks.speed()["steps_s"]
        yield {**entry, "cpu_ms_a_step": round(ms, 1), "cpu_loss": round(outcome.loss, 4)}


def _saving(folder: Path, seed: int) -> Iterator[Entry]:
    """Yield the seconds per 1,000 steps in which a save blocks the loop of situation (e)."""
    like = SCENARIOS["e"]
    data = scenarios_data.make(like.data, folder)
    for side, measure in SIDES.items():
        for every in SAVE_EVERY:
            scenario = dataclasses.replace(
                like,
                loop=dataclasses.replace(like.loop, save_every=every),
                steps=SAVING_STEPS,
                settings=like.settings | {"save_every": every},
            )
            outcome = measure(scenario, data, seed)
            a_step = 1 / outcome.marks.speed()["steps_s"]
            blocked = 1000 * a_step * outcome.stall.get("checkpoint", 0.0)
            yield {"side": side, "save_every": every, "blocked_s": round(blocked, 2)}


PARTS: dict[str, Part] = {
    "idle": Part(_idle),
    "ladder": Part(_ladder),
    "workers": Part(_workers),
    "memory": Part(_memory, is_timed=False),
    "precision": Part(_precision, is_timed=False),
    "accumulation": Part(_accumulation),
    "saving": Part(_saving),
}
