"""Records: what is kept of the finished units of a run, for whoever goes on with it."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from tokenfeed.pipeline.format.manifest import FileInfo

__all__ = ["Records", "Result", "ResultT", "whole"]


class Result(Protocol):
    """What is kept of a finished unit: a dataclass."""

    @property
    def unit(self) -> int:
        """Its number."""
        ...

    @property
    def files(self) -> Iterable[FileInfo]:
        """Those it has written, which must be as they were left for the unit to count."""
        ...


ResultT = TypeVar("ResultT", bound=Result)


class Records(Protocol[ResultT]):
    """Where a run enters what it has finished: a journal, or the records that parts share."""

    results: dict[int, ResultT]
    """Finished units by number."""

    @property
    def engine_rejected(self) -> bool:
        """Whether the fast engine was found wrong, so that the reference makes all ids."""
        ...

    def append(self, result: ResultT) -> None:
        """Record a finished unit, for good."""
        ...

    def reject_engine(self, reason: str) -> None:
        """Record that the fast engine is wrong: what it has made is to be made again."""
        ...

    def drop_damaged(self) -> bool:
        """Forget units whose shards are not as they were left; whether there are any."""
        ...


def whole(has: Callable[[FileInfo], bool], results: dict[int, ResultT]) -> dict[int, ResultT]:
    """Those results whose files are as they were left; `has` is asked for each file."""
    with ThreadPoolExecutor() as threads:
        are_whole = list(threads.map(lambda result: all(map(has, result.files)), results.values()))
    return {
        number: result
        for (number, result), is_kept in zip(results.items(), are_whole, strict=True)
        if is_kept
    }
