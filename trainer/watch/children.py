"""Child processes of `torch.multiprocessing.spawn`, watched."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Child:
    """A function that a child process runs. It can be pickled if the function can."""

    function: Callable[..., Any]
    count: int
    out: Path | None
    steps: tuple[int, int] | None

    def __call__(self, index: int, *args: Any) -> Any:
        """Run the function in the child with this index."""
        from tokenfeed.trainer.watch.watch import Watch  # imports this file

        with Watch(out=self.out, steps=self.steps, place=(index, self.count)):
            return self.function(index, *args)
