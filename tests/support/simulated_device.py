"""A device beside its host, simulated: what it idles is known, and by what.

Kernels of a stream run one after the other, each when it has been queued, its launch has come
through, and what it waits for is done. A stream holds so many kernels; a host that queues one more
waits. The device's clock runs at its own speed from its own beginning, and tells differences as
CUDA does, in 32-bit milliseconds. It is a `Clock` of the stall meter.
"""

import random
from collections import deque
from dataclasses import dataclass

import numpy as np

__all__ = ["SimulatedDevice"]

COMPUTE = "compute"


@dataclass(slots=True)
class Stream:
    """A queue of kernels, by the times at which they end."""

    ends: deque[float]
    free: float = 0.0
    waits_until: float = 0.0


class SimulatedDevice:
    """Seconds of one true clock; `host` is where the host is.

    Args:
        seed: Of the noise.
        launch: Host seconds to queue a kernel.
        latency: From queue to device.
        depth: Kernels that a stream holds.
        noise: Of kernels and launches, as a share.
        drift: Of the device's clock.
    """

    method = "simulated"
    is_beside_host = True

    def __init__(
        self,
        seed: int = 0,
        *,
        launch: float = 8e-6,
        latency: float = 4e-6,
        depth: int = 1024,
        noise: float = 0.2,
        drift: float = 2e-5,
    ) -> None:
        self.random = random.Random(seed)
        self.launch_seconds, self.latency, self.depth = launch, latency, depth
        self.noise, self.drift = noise, drift
        self.host = 7.0
        self.idle = 0.0
        self._compute = Stream(deque(maxlen=depth), free=self.host)
        self._streams = {COMPUTE: self._compute}

    def launch(self, seconds: float, stream: str = COMPUTE) -> float:
        """Queue a kernel, and say when it ends."""
        self.host += self.launch_seconds * self._factor()
        return self._queue(self._stream(stream), seconds * self._factor())

    def work(self, kernels: int, seconds: float) -> None:
        """Queue so many kernels on the stream that computes."""
        draw, noise = self.random.random, self.noise
        for _ in range(kernels):  # as `launch`, in half the time: tests queue millions
            self.host += self.launch_seconds * (1 + noise * (2 * draw() - 1))
            self._queue(self._compute, seconds * (1 + noise * (2 * draw() - 1)))

    def compute_waits(self, moment: float) -> None:
        """What is queued from here on runs after that moment: an event of another stream."""
        self._compute.waits_until = max(self._compute.waits_until, moment)

    def wait(self) -> None:
        """The host waits until all is done."""
        self.host = max(self.host, self._compute.free) + self.latency

    @property
    def done(self) -> float:
        """When all that is queued will be done."""
        return self._compute.free

    def now(self) -> float:
        return self.host

    def mark(self) -> tuple[float, float, float]:
        before = self.host
        self.host += 1e-6
        moment = self._queue(self._compute, 0.0)
        self.host += 1e-6
        return moment, before, self.host

    def passed(self, mark: float) -> bool:
        return mark <= self.host

    def seconds(self, earlier: float, later: float) -> float:
        return float(np.float32((later - earlier) * (1 + self.drift) * 1e3)) / 1e3

    def recycle(self, mark: float) -> None:
        pass

    def spin(self, seconds: float) -> bool:
        self.host += self.launch_seconds
        self._queue(self._compute, seconds)
        return True

    def takes_marks(self) -> bool:
        return True

    def _queue(self, stream: Stream, seconds: float) -> float:
        ends, free = stream.ends, stream.free
        if len(ends) == self.depth and ends[0] > self.host:
            self.host = ends[0]
        start = max(free, self.host + self.latency, stream.waits_until)
        if stream is self._compute:
            self.idle += start - free
        stream.free = end = start + seconds
        if seconds:
            ends.append(end)
        return end

    def _stream(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = Stream(deque(maxlen=self.depth))
        return self._streams[name]

    def _factor(self) -> float:
        return 1 + self.noise * (2 * self.random.random() - 1)
