"""`shards repair OUT`: make damaged or lost shards again, or fetch them from a copy."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from tokenfeed.pipeline.errors import ConfigError, ShardFormatError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.read_errors import gave_up
from tokenfeed.pipeline.format.storage import alone_in
from tokenfeed.pipeline.format.store import LocalStore, open_store
from tokenfeed.tools.data_sets.fetch import DataFile, data_files, fetch, remove_leftovers
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.shell.command_line import text
from tokenfeed.tools.shell.console import print_json

__all__ = ["Repair"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """Make damaged or lost shards again from their corpus, or fetch them from a copy.

    A file is replaced only by the bytes that the manifest names; exit code 1 if some could not be
    had.
    """

    out: Annotated[Path, Meta(title="OUT", description="a path")]
    """Output folder of `pretokenize` on this machine. To complete a data set in a store, copy a
    whole one there: `shards copy`."""
    corpus: tuple[tuple[Annotated[str, text("CORPUS...")], ...], ...] = ()
    """The folders and files that the data set was made of, in the same order."""
    mirror: Annotated[str, text("PLACE")] | None = None
    """A copy of the data set: a folder, or an address that a store is registered for."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Repair what is damaged, and say so."""
        if bool(self.corpus) == bool(self.mirror):
            raise ConfigError(
                "`shards repair` needs one of `--corpus CORPUS...`, to make shards again, and "
                "`--mirror PLACE`, to fetch them."
            )
        manifest = Manifest.read(self.out)
        with alone_in(self.out):  # a second repair waits
            remove_leftovers(self.out)
            num_damaged, problems = self._repaired(manifest)
        self._say(num_damaged, problems)
        return 1 if problems else 0

    def _repaired(self, manifest: Manifest) -> tuple[int, list[str]]:
        """Repair what is damaged: how many files were, and why some still are."""
        damaged = _damaged(self.out, manifest)
        for path in (self.out / file.info.file for file in damaged):
            if path.is_dir():
                raise ConfigError(f"{path}: is a folder, expected a file. Move the folder away.")
        problems: list[str] = []
        if damaged and self.mirror:
            problems = _fetched(self.mirror, damaged, self.out)
        elif damaged:
            from tokenfeed.tools.data_sets.remake import remake  # reads a corpus, unlike the others

            infos = [file.info for file in damaged]
            problems = remake(self.out, manifest, tuple(chain.from_iterable(self.corpus)), infos)
        return len(damaged), problems

    def _say(self, num_damaged: int, problems: list[str]) -> None:
        repaired = num_damaged - len(problems)
        if self.json:
            print_json({"ok": not problems, "repaired": repaired, "problems": problems})
            return
        print("\n".join([*problems, f"{self.out}: {_counted(num_damaged, repaired)}"]))


def _counted(num_damaged: int, repaired: int) -> str:
    if not num_damaged:
        return "good, nothing to repair"
    return f"files damaged or lost: {num_damaged:,}, repaired: {repaired:,}"


def _damaged(folder: Path, manifest: Manifest) -> list[DataFile]:
    """The files that are not as the manifest says; reads all of them."""
    files = list(data_files(manifest))
    with ThreadPoolExecutor() as threads:
        are_whole = list(threads.map(lambda file: LocalStore(folder).has(file.info), files))
    return [file for file, is_whole in zip(files, are_whole, strict=True) if not is_whole]


def _fetched(mirror: str, damaged: list[DataFile], folder: Path) -> list[str]:
    """Fetch files; why some could not be."""
    store, problems = open_store(mirror), list[str]()
    with Bar(damaged) as bar:
        for file in damaged:
            try:
                fetch(file, store, folder / file.info.file, bar)
            except ShardFormatError as error:
                if gave_up(error.__cause__):
                    raise
                problems.append(str(error))
            bar.count_unit()
    return problems
