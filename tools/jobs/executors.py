"""Clusters that a run can have its units done by: each one a `concurrent.futures.Executor`.

Which one, and where it is, is said the way its users say it: `DASK_SCHEDULER_ADDRESS` or the
configuration of Dask, `RAY_ADDRESS` or the Ray that runs on this machine. Where nothing is said,
each starts its own on this machine.
"""

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, TypeVar

from tokenfeed.pipeline.errors import ConfigError

__all__ = ["CLUSTERS", "Cluster", "Runner", "check_installed"]

Runner = Literal["local", "ray", "dask"]

_RETRIES = 3
"""How often a unit is done again elsewhere that an engine's failure, or a disk's, has ended."""
_OWN_DASK = {"threads_per_worker": 1, "dashboard_address": None, "silence_logs": logging.ERROR}
"""Of a cluster that is started here."""
ResultT = TypeVar("ResultT")


class Cluster(NamedTuple):
    """Who does units, on any machines."""

    executor: Executor
    num_workers: Callable[[], int]
    """Units that it can do at once, at this moment."""


@contextlib.contextmanager
def _dask() -> Iterator[Cluster]:
    from dask.config import get
    from distributed import Client

    is_named = get("scheduler-address", None) is not None
    with _reaching("dask"):
        client: Any = Client(set_as_default=False, **({} if is_named else _OWN_DASK))
    with client:
        executor = client.get_executor(pure=False, retries=_RETRIES)
        yield Cluster(executor, lambda: sum(client.nthreads().values()))


@contextlib.contextmanager
def _ray() -> Iterator[Cluster]:
    import ray  # pyright: ignore[reportMissingImports]

    is_ours = not ray.is_initialized()
    if is_ours:
        with _reaching("ray"), _handlers_kept():
            ray.init(log_to_driver=False, logging_level=logging.WARNING)
    try:
        yield Cluster(RayExecutor(), lambda: int(ray.cluster_resources().get("CPU", 0)))
    finally:
        if is_ours:
            ray.shutdown()


class RayExecutor(Executor):
    """Tasks of Ray as futures: one core each, dealt to as many machines as there are."""

    def __init__(self) -> None:
        import ray  # pyright: ignore[reportMissingImports]

        self._ray = ray
        self._call = ray.remote(
            num_cpus=1,
            max_retries=_RETRIES,
            retry_exceptions=[OSError],
            scheduling_strategy="SPREAD",
        )(_call)
        self._given: set[Any] = set()

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **named: Any) -> "Future[ResultT]":
        """See `Executor`."""
        reference = self._call.remote(fn, args, named)
        future: Future[ResultT] = reference.future()
        self._given.add(reference)
        future.add_done_callback(lambda _: self._given.discard(reference))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor`; as with Dask's, what is not waited for is cancelled."""
        given = list(self._given)
        if not wait or cancel_futures:
            for reference in given:
                self._ray.cancel(reference)
        if wait and given:
            self._ray.wait(given, num_returns=len(given))


CLUSTERS: dict[Runner, Callable[[], AbstractContextManager[Cluster]]] = {
    "dask": _dask,
    "ray": _ray,
}
"""By the name that `--runner` knows it by, what opens it for a block."""

_MODULES: dict[Runner, str] = {"dask": "distributed", "ray": "ray"}


def check_installed(runner: Runner) -> None:
    """Refuse a runner whose package is not there.

    Raises:
        ConfigError: Says what to install.
    """
    if runner in _MODULES and not find_spec(_MODULES[runner]):
        raise ConfigError(
            f"`--runner {runner}`: {runner} is not installed (pip install 'tokenfeed[{runner}]')."
        )


def _call(function: Callable[..., ResultT], args: Any, named: Any) -> ResultT:
    return function(*args, **named)


@contextlib.contextmanager
def _reaching(runner: Runner) -> Iterator[None]:
    """Have a cluster that cannot be reached end in one line."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"`--runner {runner}`: no cluster could be reached ({reason or type(error).__name__}). "
            "Start it, or say where it is: see docs/how/machines.md."
        ) from error


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Have a library that takes signals for itself give them back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
