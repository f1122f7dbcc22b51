"""Random training loops on a simulated device: all that a loop does, drawn from a seed."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.stall.device import Array, Device
from tokenfeed.trainer.stall import Cause, StallMeter

WARMUP = 5


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop. Shares are of the seconds of a usual step."""

    seed: int
    regime: str = ""
    family: str = "usual"
    steps: int = 800
    parts: int = 1
    """Micro-batches of a step."""
    kernels: int = 300
    """Kernels of a micro-batch."""
    kernel: float = 20e-6
    """Mean seconds of a kernel."""
    launch: float = 10e-6
    """Mean host seconds to queue a kernel."""
    pause: float = 1e-6
    order: str = "first"
    """When a batch is fetched: first, late, last, or never in a bracket."""
    speed: str = "steady"
    change: float = 0.0
    """Share by which the device's speed changes."""
    at: tuple[float, float] = (0.5, 0.7)
    """When the speed changes, as shares of the run."""
    dwell: tuple[float, float] = (0.1, 0.1)
    """Share of the run that a neighbour stays."""
    sizes: str = "equal"
    """Sizes of the steps: equal, vary, three (shapes), or stages."""
    says_size: bool = True
    """Whether the loop passes the size to the meter."""
    constant: float = 0.2
    """Share of a usual step's kernels that does not grow with its size."""
    curve: float = 0.0
    """Share of it that grows with the square of the size, as attention does."""
    heavy: int = 0
    """Every so many steps one is heavier."""
    heavy_share: float = 0.5
    data: float = 0.05
    item: bool = False
    """Whether the host waits for a value in each step, and computes for `item_host`."""
    item_host: float = 0.0
    pauses: float = 0.0
    """Share of steps in which the host stops for `stop`."""
    stop: float = 1.0
    copy: float = 0.0
    evaluates: int = 0
    saves: int = 0
    logs: int = 0
    sways: bool = False
    """Whether the speed of the host sways."""
    jitter: float = 0.0
    graphs: int = 0
    """Graphs of a micro-batch, if its kernels are in CUDA graphs: each runs as one kernel."""
    ranks: int = 1
    exchange: float = 0.0
    brackets_exchange: bool = True
    loss: float | None = None
    """Share of its records that each trace loses."""

    @property
    def seconds(self) -> float:
        """Seconds of a usual step."""
        launches = self.graphs or self.kernels
        return self.parts * max(self.kernels * self.kernel, launches * self.launch)


def draw(seed: int) -> Loop:
    """Return a loop of the family that the method was chosen with."""
    dice = random.Random(seed)
    pick, uniform = dice.choice, dice.uniform
    kernel = 10 ** uniform(-5.4, -4.2)
    regime = pick(["ahead", "close", "close", "behind", "behind"])
    least, most = {"ahead": (0.2, 0.7), "close": (0.7, 1.1), "behind": (1.0, 2.2)}[regime]
    parts = pick([1, 1, 2, 4])
    kernels = dice.randrange(100, 700) if dice.random() < 0.85 else dice.randrange(1100, 2500)
    return Loop(
        seed=seed,
        regime=regime,
        parts=parts,
        kernels=kernels // parts,
        kernel=kernel,
        launch=kernel * uniform(least, most),
        pause=uniform(0.5e-6, 1.5e-6),
        order=pick(["first", "late", "last", "never"]),
        speed=pick(["steady", "steady", "step", "step", "two steps", "drift", "neighbour", "walk"]),
        change=uniform(0.05, 0.3) * pick([-1, 1]),
        at=(uniform(0.1, 0.9), uniform(0.1, 0.9)),
        dwell=(uniform(0.02, 0.15), uniform(0.02, 0.15)),
        sizes=pick(["equal", "equal", "vary"]),
        constant=uniform(0.1, 0.5),
        heavy=pick([0, 0, 0, 8, 16]),
        heavy_share=uniform(0.3, 1.0),
        data=uniform(0.005, 0.12) if dice.random() < 0.8 else 0.4,
        item=dice.random() < 0.2,
        item_host=uniform(0, 0.1),
        pauses=pick([0, 0, 0, 0.01]),
        stop=uniform(0.5, 3),
        copy=uniform(0.02, 0.4) if dice.random() < 0.15 else 0.0,
        evaluates=pick([0, 40]),
        saves=pick([0, 0, 60]),
        logs=pick([0, 10]),
        sways=dice.random() < 0.3,
        jitter=pick([0.0, 0.01, 0.03]),
    )


def _three(loop: Loop, dice: random.Random) -> Loop:
    return replace(loop, sizes="three", curve=dice.uniform(0, 0.4), says_size=dice.random() < 0.7)


def _stages(loop: Loop, dice: random.Random) -> Loop:
    return replace(loop, sizes="stages", curve=dice.uniform(0, 0.3))


def _ranks(loop: Loop, dice: random.Random) -> Loop:
    exchange, says = dice.uniform(0.01, 0.15), dice.random() < 0.5
    return replace(loop, ranks=8, exchange=exchange, brackets_exchange=says, steps=400)


def _graphs(loop: Loop, dice: random.Random) -> Loop:
    graphs = dice.choice([1, 2, 8])
    launch = loop.kernel * loop.kernels / graphs * dice.uniform(0.01, 1.3)
    return replace(loop, graphs=graphs, launch=launch)


def _neighbours(loop: Loop, dice: random.Random) -> Loop:
    return replace(loop, speed="two neighbours")


def _lost(loop: Loop, dice: random.Random) -> Loop:
    return replace(loop, loss=0.05)


FAMILIES: dict[str, Callable[[Loop, random.Random], Loop]] = {
    "three shapes": _three,
    "stages": _stages,
    "8 ranks": _ranks,
    "graphs": _graphs,
    "two neighbours": _neighbours,
    "5 % lost": _lost,
}
"""Loops of kinds that the method was not chosen with."""


def draw_new(family: str, seed: int) -> Loop:
    """Return a loop of a family in `FAMILIES`."""
    dice = random.Random(f"{family} {seed}")
    return replace(FAMILIES[family](draw(dice.randrange(10**9)), dice), family=family, seed=seed)


class Rank:
    """One process of a loop, on one device."""

    def __init__(self, loop: Loop, device: Device, meter: StallMeter | None, rank: int = 0) -> None:
        self.loop, self.device, self.meter = loop, device, meter
        seed = loop.seed * 1009 + rank
        self._dice, shape = random.Random(seed + 1), np.random.default_rng(loop.seed + 2)
        self._half = half = max(1, (loop.graphs or loop.kernels) // 2)
        lengths = loop.kernel * np.exp(shape.normal(0, 0.8, 2 * half))
        if loop.graphs:
            lengths *= loop.kernels / loop.graphs
        usual = loop.kernel * loop.kernels / (2 * half)
        self._lengths: Array = lengths * (usual / lengths.mean())
        self._costs: Array = shape.uniform(0.6, 1.4, 2 * half)
        self._costs *= np.where(np.arange(2 * half) < half, 1.15, 0.85)
        self._neighbours, self._sway, self._walk = [False, False], 0.0, 1.0
        self._begun: tuple[float, dict[str, float]] = (0.0, {})

    def first_half(self, number: int) -> None:
        """Do all of a step up to the exchange of gradients."""
        loop, dice = self.loop, self._dice
        share = number / loop.steps
        self.device.speed = self._speed(share) * (1 + loop.jitter * dice.gauss(0, 1))
        self._sway = 0.98 * self._sway + dice.gauss(0, 0.04) if loop.sways else 0.0
        self.device.host_speed = max(0.5, 1 + self._sway)
        self._size = self._draw_size(share)
        stops = dice.random() < loop.pauses
        for part in range(loop.parts):
            if loop.order in ("first", "never"):
                self._fetch()
            self._work(0, self._half)
            if stops and part == 0:
                self.device.stop(loop.stop * loop.seconds)
            if loop.order == "late":
                self._fetch()
            if loop.item and part == loop.parts - 1:
                self.device.wait()
                self.device.stop(loop.item_host * loop.seconds)
            self._work(self._half, 2 * self._half)
            if loop.order == "last":
                self._fetch()
        if loop.heavy and number % loop.heavy == loop.heavy - 1:
            for _ in range(max(1, round(loop.heavy_share * loop.parts))):
                self._work(0, 2 * self._half)

    def second_half(self, number: int) -> None:
        """End a step, and do what happens between steps."""
        loop, device = self.loop, self.device
        if self.meter:
            self.meter.step(slots=round(8192 * self._size) if loop.says_size else 0)
        if number == WARMUP - 1:
            self._begun = device.border(), dict(device.idle)
        rare: tuple[tuple[int, Cause, float], ...] = (
            (loop.logs, "log", 0.05),
            (loop.evaluates, "evaluation", 3.0),
            (loop.saves, "checkpoint", 4.0),
        )
        for every, cause, seconds in rare:
            if every and number % every == every - 1:
                self._bracket(cause, seconds, waits=True)

    def truth(self) -> dict[str, float]:
        """Return the idle shares after the warm-up, by cause."""
        seconds = self.device.border() - self._begun[0]
        before = self._begun[1]
        idle = self.device.idle
        return {cause: (idle[cause] - before.get(cause, 0.0)) / seconds for cause in idle}

    def exchange(self, start: float, end: float) -> None:
        """Exchange gradients with other ranks on another stream."""
        if self.loop.brackets_exchange:
            self._enter("communication")
            self.device.hold(start, end, "communication")
            self._leave()
        else:
            self.device.hold(start, end, "communication")
        self._work(0, 2)

    def _speed(self, share: float) -> float:
        loop, dice = self.loop, self._dice
        if loop.speed == "drift":
            return 1 + loop.change * share
        if loop.speed in ("neighbour", "two neighbours"):
            for each, dwell in enumerate(loop.dwell):
                self._neighbours[each] ^= dice.random() < 1 / (dwell * loop.steps)
            second = loop.speed == "two neighbours" and self._neighbours[1]
            factor = 1 + abs(loop.change) * self._neighbours[0]
            return factor * (1 + 0.6 * abs(loop.change) * second)
        if loop.speed == "walk":
            self._walk *= 1 + 0.004 * dice.gauss(0, 1)
            return self._walk
        if loop.speed == "steady":
            return 1.0
        back = loop.speed == "two steps" and share > loop.at[1]
        return 1 + loop.change * (share > loop.at[0]) - loop.change * back

    def _draw_size(self, share: float) -> float:
        sizes = self.loop.sizes
        if sizes == "vary":
            return self._dice.uniform(0.5, 1.5)
        if sizes == "three":
            return self._dice.choice([0.5, 0.9, 1.6])
        if sizes == "stages":
            return 0.5 if share < self.loop.at[0] else 1.0 if share < max(self.loop.at) else 2.0
        return 1.0

    def _work(self, first: int, last: int) -> None:
        loop = self.loop
        size = loop.constant + (1 - loop.constant - loop.curve) * self._size
        size += loop.curve * self._size**2
        self.device.work(self._lengths[first:last] * size, self._costs[first:last])

    def _fetch(self) -> None:
        loop = self.loop
        self._bracket("data", loop.data / loop.parts, is_hidden=loop.order == "never")
        if loop.copy:
            self.device.copy(loop.copy * loop.seconds / loop.parts)

    def _bracket(
        self, cause: Cause, share: float, *, waits: bool = False, is_hidden: bool = False
    ) -> None:
        if not is_hidden:
            self._enter(cause)
        if waits:
            self.device.wait()
        self.device.stop(share * self.loop.seconds)
        if not is_hidden:
            self._leave()

    def _enter(self, cause: Cause) -> None:
        self._outer = self.meter.enter(cause) if self.meter else ""
        self.device.border()
        self.device.cause = cause

    def _leave(self) -> None:
        self.device.border()
        self.device.cause = "launch"
        if self.meter:
            self.meter.leave(self._outer)


def run(loop: Loop, make_meter: Callable[[Device], StallMeter] | None = None) -> list[Rank]:
    """Run a loop on its ranks, with a meter on each or without."""
    ranks = []
    for rank in range(loop.ranks):
        device = Device(loop.seed * 1009 + rank + 3, launch=loop.launch, pause=loop.pause)
        ranks.append(Rank(loop, device, make_meter(device) if make_meter else None, rank))
    for number in range(loop.steps + WARMUP):
        for each in ranks:
            each.first_half(number)
        if loop.ranks > 1:
            starts = [each.device.border() for each in ranks]
            end = max(starts) + loop.exchange * loop.seconds
            for each, start in zip(ranks, starts, strict=True):
                each.exchange(start, end)
        for each in ranks:
            each.second_half(number)
    for each in ranks:
        each.device.wait()
    return ranks
