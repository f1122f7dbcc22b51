"""How busy the parts of a GPU are, by the counters that Hopper and later chips have (GPM)."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Activity", "ActivityCounter"]


@dataclass(frozen=True, slots=True)
class Activity:
    """Shares of the time between two readings, 0 to 1."""

    multiprocessors: float
    """In which a multiprocessor had work, mean of all."""
    tensor_cores: float
    memory_bandwidth: float


class ActivityCounter:
    """Takes a sample at each reading, and tells what was between it and the one before."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._samples: tuple[Any, Any] | None = None
        self._is_first = True
        import pynvml

        try:
            if pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                self._samples = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        except (pynvml.NVMLError, AttributeError):  # an older driver, or an older package
            self._samples = None

    def read(self) -> Activity | None:
        """Since the reading before; None at the first, and where the chip has no such counters."""
        if self._samples is None:
            return None
        import pynvml

        try:
            before, now = self._samples
            pynvml.nvmlGpmSampleGet(self._handle, now)
            self._samples = now, before
            if self._is_first:
                self._is_first = False
                return None
            return _between(before, now)
        except pynvml.NVMLError:
            self._samples = None
            return None


def _between(before: Any, now: Any) -> Activity:
    import pynvml

    wanted = (
        pynvml.NVML_GPM_METRIC_SM_UTIL,
        pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
        pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    )
    asked: Any = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics, asked.sample1, asked.sample2 = len(wanted), before, now
    for number, metric in enumerate(wanted):
        asked.metrics[number].metricId = metric
    found: Any = pynvml.nvmlGpmMetricsGet(asked)
    return Activity(*(found.metrics[number].value / 100 for number in range(len(wanted))))
