"""Training loops on a simulated device: what they idle is known, with a meter and without.

The truth is that of the same loop without a meter: same kernels, same noise, and no mark and no
spin in between. A fault is put into a loop that has none; what it cost is the difference.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from support.stall_device import SimulatedDevice
from tokenfeed.trainer.stall import StallMeter, StallReport
from tokenfeed.trainer.stall.causes import Cause
from tokenfeed.trainer.stall.watchers import AllocatorWatch

WARMUP = 5
TOKENS = 1000
METER_SECONDS = 11.4e-6
"""The meter's Python around a mark: 57 µs for the five marks of a step (`benchmarks/stall/`)."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop."""

    kernels: int = 100
    """Of a micro-batch."""
    kernel_seconds: float = 100e-6
    launch_seconds: float = 8e-6
    depth: int = 512
    accumulation: int = 2
    data_seconds: float = 0.5e-3
    data_noise: float = 0.2
    data_spikes: float = 0.0
    """Share of batches that are ten times as late."""
    copy_seconds: float = 20e-6
    log_every: int = 10
    log_seconds: float = 0.2e-3
    sub_marks: int = 0
    """More marks inside a micro-batch."""
    steps: int = 300
    pause_seconds: float = 0.0
    """Of an evaluation before the first step."""
    drift: float | None = None
    """Of the device's clock; None for one of the seed."""
    other_kernels: int = 0
    """Of a micro-batch, on a second device that the same host keeps busy."""
    exchange_seconds: float = 0.0
    """What several ranks take to add up their gradients in each step."""
    meter_seconds: float = 0.0
    """Host seconds of the meter's Python around each mark."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What a loop did without a meter, after its warm-up."""

    idle: float
    """Share of the time."""
    seconds: float


Hook = Callable[["Run", int], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong in a loop, and where it should be found."""

    cause: Cause
    change: Callable[[Loop], Loop] = lambda loop: loop
    in_step: Hook = lambda run, step: None
    """In the middle of the work of a step."""
    after_micro_batch: Hook = lambda run, step: None
    after_step: Hook = lambda run, step: None


class Run:
    """A loop that runs."""

    def __init__(self, loop: Loop, fault: Fault | None, seed: int, *, metered: bool) -> None:
        self.loop, self.fault, self.seed = loop, fault or Fault("other"), seed
        drift = random.Random(seed).gauss(0, 2e-5) if loop.drift is None else loop.drift
        self.device = SimulatedDevice(
            launch=loop.launch_seconds,
            depth=loop.depth,
            drift=drift,
            meter_seconds=loop.meter_seconds,
        )
        self.other = SimulatedDevice(launch=loop.launch_seconds, on=self.device.clock)
        self.allocations = self.frees = 0
        self.meter: StallMeter | None = None
        if metered:
            self.meter = StallMeter(clock=self.device, skipped_steps=WARMUP)
            self.meter._allocator = AllocatorWatch(self._allocator_statistics)
            self.meter._collector.close()  # of this process, which is none of the simulation's
        self.begun: tuple[float, float] = (0.0, 0.0)

    def _allocator_statistics(self) -> dict[str, Any]:
        freed = {"all": {"freed": self.frees}}
        return {"num_device_alloc": self.allocations, "reserved_bytes": freed}

    def all_steps(self) -> None:
        all_steps([self])

    def begin(self) -> None:
        """Evaluate, as before a first step."""
        if self.loop.pause_seconds:
            with self.cause("evaluation"):
                self.device.wait()
                self.device.host += self.loop.pause_seconds

    def truth(self) -> Truth:
        """Of the steps after the warm-up."""
        seconds = self.ended[0] - self.begun[0]
        return Truth((self.ended[1] - self.begun[1]) / seconds, seconds)

    def step(self, step: int) -> None:
        self.work(step)
        self.finish(step)

    def work(self, step: int) -> None:
        """Queue what a rank does for itself."""
        self.device.random.seed(self.seed * 1_000_003 + step)
        loop, draw = self.loop, random.Random(self.seed * 1_000_003 + step)
        for part in range(loop.accumulation):
            with self.cause("data"):
                self.device.host += self.data(draw)
                moment = self.device.launch(loop.copy_seconds, "copy")
                self.device.compute_waits(moment)
            self.micro_batch(step, part)
            self.fault.after_micro_batch(self, step)

    def finish(self, step: int) -> None:
        """End a step."""
        if self.meter:
            self.meter.step(TOKENS)
        self.fault.after_step(self, step)
        if step % self.loop.log_every == 0:
            with self.cause("log"):
                self.device.wait()
                self.device.host += self.loop.log_seconds
        if step == WARMUP:
            self.begun = (self.device.done, self.device.idle)
        self.ended = (self.device.done, self.device.idle)

    def data(self, draw: random.Random) -> float:
        loop = self.loop
        seconds = loop.data_seconds * (1 + loop.data_noise * (2 * draw.random() - 1))
        return seconds * (10 if draw.random() < loop.data_spikes else 1)

    def micro_batch(self, step: int, part: int) -> None:
        pieces = self.loop.sub_marks + 1
        if self.loop.other_kernels:
            self.other.work(self.loop.other_kernels, self.loop.kernel_seconds)
        for piece in range(pieces):
            self.device.work(self.loop.kernels // pieces // 2, self.loop.kernel_seconds)
            if part == 0 and piece == 0:
                self.fault.in_step(self, step)
            self.device.work(self.loop.kernels // pieces // 2, self.loop.kernel_seconds)
            if self.meter and piece < pieces - 1:
                self.meter.mark()

    def cause(self, name: Cause) -> Any:
        return self.meter.cause(name) if self.meter else _Nothing()

    def interrupt(self, cause: Cause, seconds: float) -> None:
        """Python stops within the work."""
        outer = self.meter.interrupt(cause) if self.meter else None
        self.device.host += seconds
        if self.meter and outer:
            self.meter.resume(outer)


def all_steps(ranks: list[Run]) -> None:
    """Run the loops of ranks, which add up their gradients in each step."""
    loop = ranks[0].loop
    for run in ranks:
        run.begin()
    for step in range(1, loop.steps + WARMUP + 1):
        for run in ranks:
            run.work(step)
        if len(ranks) > 1:
            _exchange(ranks, loop.exchange_seconds)
        for run in ranks:
            run.finish(step)
    for run in ranks:
        run.device.wait()


def _exchange(ranks: list[Run], seconds: float) -> None:
    outers = [run.meter.enter("communication") if run.meter else None for run in ranks]
    done = max(run.device.done for run in ranks) + seconds
    for run, outer in zip(ranks, outers, strict=True):
        run.device.compute_waits(done)
        if run.meter and outer:
            run.meter.leave(outer)
        run.device.work(4, run.loop.kernel_seconds)  # the optimizer


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *raised: object) -> None: ...


def measure(loop: Loop, fault: Fault | None = None, seed: int = 0) -> StallReport:
    """What the meter says."""
    run = Run(loop, fault, seed, metered=True)
    run.all_steps()
    assert run.meter is not None
    return run.meter.report()


def truth(loop: Loop, fault: Fault | None = None, seed: int = 0) -> Truth:
    """What is so."""
    run = Run(loop, fault, seed, metered=False)
    run.all_steps()
    return run.truth()


CLEAN = Loop()
REGIMES: dict[str, Loop] = {
    "gpu-bound": CLEAN,
    "data-bound": replace(CLEAN, data_seconds=14e-3),
    "launch-bound": replace(CLEAN, kernel_seconds=5e-6, launch_seconds=9e-6),
    "mixed": replace(CLEAN, kernel_seconds=12e-6, data_seconds=0.6e-3, data_spikes=0.1),
    "launch-bound, more kernels than the queue holds": replace(
        CLEAN, kernels=2400, kernel_seconds=5e-6, accumulation=1, sub_marks=3, steps=150
    ),
    "gpu-bound, more kernels than the queue holds": replace(
        CLEAN, kernels=1200, kernel_seconds=10e-6, accumulation=1, steps=150
    ),
}


def _every(count: int, hook: Hook) -> Hook:
    return lambda run, step: hook(run, step) if step % count == 0 else None


def _bracket(cause: Cause, seconds: float) -> Hook:
    def bracket(run: Run, step: int) -> None:
        with run.cause(cause):
            run.device.wait()
            run.device.host += seconds

    return bracket


def _evaluate(run: Run, step: int) -> None:
    with run.cause("evaluation"):
        run.device.wait()
        run.device.host += 60e-3


def retry(run: Run, step: int) -> None:
    """Memory is given back: the driver waits for the device, and takes its time."""
    run.allocations += 1
    run.device.wait()
    run.device.host += 8e-3


def _free(run: Run, step: int) -> None:
    """At the end of a step, all cached memory is given back to the driver."""
    run.frees += 1
    run.device.wait()
    run.device.host += 2e-3


def allocate(run: Run, step: int) -> None:
    """The next step asks the driver for memory again."""
    if step > 1:
        run.allocations += 1
        run.device.host += 1e-3


def emptied_cache(every: int) -> Fault:
    """Memory is freed in one step of so many, and allocated in the next one."""
    return Fault(
        "allocator",
        in_step=lambda run, step: allocate(run, step) if (step - 1) % every == 0 else None,
        after_micro_batch=_every(every, _free),
    )


FAULTS: dict[str, Fault] = {
    "a slow loader": Fault("data", lambda loop: replace(loop, data_seconds=14e-3)),
    "a copy from pageable memory": Fault("copy", lambda loop: replace(loop, copy_seconds=14e-3)),
    "item in every micro-batch": Fault(
        "wait",
        lambda loop: replace(loop, data_seconds=2e-3),
        after_micro_batch=lambda run, step: run.device.wait(),
    ),
    "a slow log": Fault("log", lambda loop: replace(loop, log_seconds=40e-3)),
    "a checkpoint that is written at once": Fault(
        "checkpoint", after_step=_every(25, _bracket("checkpoint", 100e-3))
    ),
    "tiny kernels": Fault(
        "launch", lambda loop: replace(loop, kernel_seconds=4e-6, data_seconds=0.1e-3)
    ),
    "garbage collection": Fault(
        "garbage collection",
        in_step=_every(5, lambda run, step: run.interrupt("garbage collection", 150e-3)),
    ),
    "allocator retries": Fault("allocator", in_step=_every(5, retry)),
    "recompilation": Fault(
        "recompilation",
        in_step=_every(20, lambda run, step: run.interrupt("recompilation", 150e-3)),
    ),
    "evaluation": Fault("evaluation", after_step=_every(20, _evaluate)),
    "a late rank": Fault("communication", after_step=_bracket("communication", 3e-3)),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A loop drawn at random: some regime, clock, pause, noise, and number of devices and ranks."""

    regime: str
    loop: Loop
    seed: int
    ranks: int


def draw_case(seed: int, step_seconds: tuple[float, float]) -> Case:
    """Draw a case of 150 to 600 kernels a micro-batch and launches of 4 to 15 µs, as measured on
    real hosts. Without noise and a loader, its steps take between two numbers of seconds."""
    draw, regime = random.Random(seed), ("gpu", "data", "launch", "balanced", "mixed")[seed % 5]
    while True:
        kernels, parts = draw.randrange(150, 602, 2), draw.choice([1, 2, 3])
        launch = draw.uniform(4e-6, 15e-6)
        kernel = launch * draw.uniform(*_KERNEL_BY_LAUNCH[regime])
        batch = kernels * max(kernel, launch)
        if step_seconds[0] <= parts * batch <= step_seconds[1]:
            break
    loop = Loop(
        kernels=kernels,
        kernel_seconds=kernel,
        launch_seconds=launch,
        accumulation=parts,
        data_seconds=draw.uniform(*_DATA_BY_BATCH[regime]) * kernels * kernel,
        data_noise=draw.uniform(0, 0.5),
        data_spikes=draw.choice([0.0, 0.05, 0.1]) if regime == "mixed" else 0.0,
        log_every=draw.choice([5, 10, 25, 10**6]),
        log_seconds=draw.uniform(0.1e-3, 0.5e-3),
        steps=draw.randrange(60, 160),
        pause_seconds=draw.choice([0.0, 10.0, 30.0]),
        drift=draw.uniform(-1e-4, 1e-4),
        other_kernels=draw.choice([0, 0, kernels // 2]),
        exchange_seconds=draw.uniform(20e-6, 100e-6),
        meter_seconds=METER_SECONDS,
    )
    return Case(regime, loop, seed, draw.choice([1, 1, 2, 4]))


_KERNEL_BY_LAUNCH = {
    "gpu": (1.5, 10),
    "data": (1.5, 10),
    "launch": (0.2, 0.7),
    "balanced": (0.9, 1.1),
    "mixed": (0.7, 4),
}
"""Seconds of a kernel, as a multiple of those of its launch."""
_DATA_BY_BATCH = {
    "gpu": (0.1, 0.3),
    "data": (1.2, 3),
    "launch": (0.05, 0.2),
    "balanced": (0, 0.1),
    "mixed": (0.1, 0.6),
}
"""Seconds of a batch in the loader, as a multiple of those of its kernels."""


def without(loop: Loop, cause: Cause) -> Loop:
    """The loop without a cause of its stall."""
    return {
        "data": replace(loop, data_seconds=0.0, data_spikes=0.0),
        "launch": replace(
            loop, launch_seconds=1e-7, data_seconds=loop.data_seconds + loop.launch_seconds
        ),  # to launch the copy is a part of the loader's time
        "log": replace(loop, log_every=10**9),
    }[cause]


def runs(case: Case, loop: Loop | None = None, *, metered: bool) -> list[Run]:
    """Run the ranks of a case, or those of another loop in its place. Of several ranks the last one
    has a slower loader."""
    loop = loop or case.loop
    ranks = [
        Run(loop, None, case.seed + 1000 * rank, metered=metered) for rank in range(case.ranks)
    ]
    if case.ranks > 1:
        batch = loop.kernels * max(loop.kernel_seconds, loop.launch_seconds)
        ranks[-1].loop = replace(loop, data_seconds=loop.data_seconds + 2 * batch)
    all_steps(ranks)
    return ranks


def reports(ranks: list[Run]) -> list[StallReport]:
    """What the meters of ranks report when they have told each other."""
    meters = [run.meter for run in ranks if run.meter]
    told: list[list[float]] = []
    for meter in meters:
        meter.gather(lambda numbers: told.append(numbers) or told)  # type: ignore[func-returns-value]
    for meter in meters:
        meter.gather(lambda _: told)
        meter.close()
    return [meter.report() for meter in meters]
