"""A run that makes a whole data set in a store: the records that parts leave, and a claim.

All that it knows of itself is in the store, so any machine can go on with it. Its records are those
of `parts`, which it takes over by finding them in the same place.
"""

from pathlib import Path
from typing import Any, Self

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import MANIFEST_FILE
from tokenfeed.tools.outputs.store import StoreOutput
from tokenfeed.tools.run.lease import Lease
from tokenfeed.tools.run.parts import Part, Parts, is_begun, remove_parts
from tokenfeed.tools.run.records import ResultT

__all__ = ["ClaimedStore"]


class ClaimedStore(Parts[ResultT]):
    """The records of a run in a store, kept from other runs until the block ends."""

    is_new: bool
    _lease: Lease

    @classmethod
    def take(cls, output: StoreOutput, recipe: dict[str, Any], kind: type[ResultT]) -> Self:
        """Begin a run in a store, or continue the unfinished one there.

        Args:
            output: Where the data set is made.
            recipe: Everything the output depends on.
            kind: What is kept of a finished unit.

        Raises:
            ConfigError: Another run is at work there, or was begun by another command.
        """
        run = cls(output, kind)
        run._lease = Lease.take(output.store)
        try:
            run._begin_or_go_on(recipe)
        except BaseException:
            run._lease.release()
            raise
        return run

    @property
    def made_folders(self) -> list[Path]:
        """A store has none."""
        return []

    def append(self, result: ResultT) -> None:
        """See `Parts`.

        Raises:
            TokenfeedError: Another run has taken over.
        """
        self._lease.check()
        super().append(result)

    def remove(self) -> None:
        """Delete what says that it is unfinished."""
        remove_parts(self._output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the store to others."""
        self._lease.release()

    def _begin_or_go_on(self, recipe: dict[str, Any]) -> None:
        self.is_new = not is_begun(self._output)
        if self.is_new and self._output.size(MANIFEST_FILE) is not None:
            raise ConfigError(
                f"{self._output}: already holds a finished data set, which another run has just "
                "made."
            )
        self._enter_job(recipe, None)
        self._check_job(recipe)
        self._load(Part(0, 1))
