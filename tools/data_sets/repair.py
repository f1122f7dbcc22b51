"""Make shards of a finished data set again: their units, cut and encoded as they once were.

What was asked for when the data set was made stands in `.made_by.json`; what its corpus was the
caller says, since it may lie elsewhere now. Whether it is still the same shows in the bytes:
nothing takes the place of a damaged file but what the manifest names.

`shards repair OUT`: what the command line says, and what became of it.
"""

import os
import re
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import tyro
import xxhash

from tokenfeed.pipeline.errors import ConfigError, CorpusError, ShardFormatError
from tokenfeed.pipeline.format.manifest import (
    MADE_BY_FILE,
    TOKENIZER_FILE,
    FileInfo,
    Manifest,
    ShardInfo,
)
from tokenfeed.pipeline.format.read_errors import gave_up
from tokenfeed.pipeline.format.storage import alone_in, atomic_write, sync_folder
from tokenfeed.pipeline.format.store import LocalStore, open_store
from tokenfeed.tools.data_sets.fetch import (
    SCRATCH_PREFIX,
    DataFile,
    data_files,
    fetch,
    remove_leftovers,
)
from tokenfeed.tools.encoding.engines import EngineRejected, engine_version
from tokenfeed.tools.encoding.tasks import TASK_CLASSES
from tokenfeed.tools.encoding.tokenizer import fetch_tokenizer_json
from tokenfeed.tools.encoding.unit import EncodeSettings, UnitEncoder
from tokenfeed.tools.jobs.claim import made_by
from tokenfeed.tools.jobs.crew import Worker
from tokenfeed.tools.jobs.progress import Bar
from tokenfeed.tools.pretokenizing.inputs import Inputs
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.pretokenizing.prepare import Listed, Prepared
from tokenfeed.tools.shell.console import print_json

__all__ = ["Repair", "remake"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """Make damaged or lost shards again from their corpus, or fetch them from a copy.

    A file is replaced only by the bytes that the manifest names; exit code 1 if some could not be
    had.
    """

    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    """Output folder of `pretokenize`."""
    corpus: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="CORPUS...", help_behavior_hint="")
    ] = ()
    """The folders and files that the data set was made of, in the same order."""
    mirror: Annotated[
        str | None, tyro.conf.arg(name="from", metavar="MIRROR", help_behavior_hint="")
    ] = None
    """A copy of the data set: a folder, or an address that a store is registered for."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Repair what is damaged, and say so."""
        if bool(self.corpus) == bool(self.mirror):
            raise ConfigError(
                "`shards repair` needs one of `--corpus CORPUS...`, to make shards again, and "
                "`--from MIRROR`, to fetch them."
            )
        if re.match("[a-z][a-z0-9+.-]*:/", str(self.out)):
            raise ConfigError(
                f"{self.out}: repairs are made in a folder of this machine. `shards copy` from a "
                "whole data set completes one in a store."
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
        problems: list[str] = []
        if damaged and self.mirror:
            problems = _fetched(self.mirror, damaged, self.out)
        elif damaged:
            infos = [file.info for file in damaged]
            problems = remake(self.out, manifest, self.corpus, infos)
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


_Recipe = TypedDict(
    "_Recipe",
    {
        "--task": str,
        "the fields": list[str],
        "--end-token": str | None,
        "--add-special-tokens": bool,
        "--special-tokens-in-text": Literal["plain", "split"],
        "--split": list[str],
        "--validation": float,
        "--exclude": list[str],
        "--shard-size": int,
        "--max-record": int,
        "--tokenizer": str | None,
        "the bytes of the input": int,
    },
)
"""What is used of the file that says how the data set was made."""


def remake(
    folder: Path, manifest: Manifest, corpus: tuple[str, ...], damaged: list[FileInfo]
) -> list[str]:
    """Make shards, and the tokenizer, of a finished data set again; why some files could not be.

    Args:
        folder: Where the data set is.
        manifest: What it is to be.
        corpus: What it was made of.
        damaged: Which files of it.

    Raises:
        ConfigError: It is not known what made it, or its shards cannot be made one by one.
        CorpusError: The corpus is another one.
    """
    shards = [info for info in damaged if isinstance(info, ShardInfo)]
    problems = [
        f"{folder / info.file}: is made of the whole corpus. Restore it by `--from MIRROR`."
        for info in damaged
        if info not in (*shards, manifest.tokenizer)
    ]
    recipe = _recipe(folder)
    json_bytes = _tokenizer(folder, manifest, recipe)
    if manifest.tokenizer in damaged:
        atomic_write(folder / TOKENIZER_FILE, json_bytes)
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=folder) as name:
        scratch = Path(name)  # beside the shards, so that they can be renamed
        (scratch / TOKENIZER_FILE).write_bytes(json_bytes)
        options = _options(folder, recipe, manifest, corpus, scratch)
        listed = Listed.from_options(options, options.output, "new")
        run = Prepared.from_listed(listed).run
        _check_same(run.inputs, manifest, recipe)
        settings = replace(run.settings, audits=False)
        return problems + _encoded(settings, run.inputs, shards, folder, manifest)


def _recipe(folder: Path) -> _Recipe:
    """Return the recipe that made the data set."""
    if not (folder / MADE_BY_FILE).exists():
        raise ConfigError(
            f"{folder}: has no {MADE_BY_FILE}, which says by what options it was made. Copy that "
            "file from where the data set was made, or repair by `--from MIRROR`."
        )
    try:
        return msgspec.convert(made_by(LocalStore(folder)), _Recipe)
    except msgspec.ValidationError as error:
        raise _damaged_recipe(folder, error) from None


def _tokenizer(folder: Path, manifest: Manifest, recipe: _Recipe) -> bytes:
    """The data set's own tokenizer.json, or where it is damaged the one that was named then."""
    path, named = folder / TOKENIZER_FILE, recipe.get("--tokenizer")
    if path.exists() and _is_meant(content := path.read_bytes(), manifest):
        return content
    if named and _is_meant(content := fetch_tokenizer_json(named), manifest):
        return content
    raise ConfigError(
        f"{path}: is damaged or lost, and {named or 'a tokenizer that was trained'} does not give "
        "it again. Restore it by `--from MIRROR`."
    )


def _is_meant(content: bytes, manifest: Manifest) -> bool:
    return xxhash.xxh3_64_hexdigest(content) == manifest.tokenizer.xxh3


def _options(
    folder: Path, recipe: _Recipe, manifest: Manifest, corpus: tuple[str, ...], scratch: Path
) -> Options:
    """The options of the command that made the data set.

    Raises:
        ConfigError: The recipe does not say them all, or they contradict one another.
    """
    engine: Any = manifest.tokenizer.engine
    task: Any = recipe["--task"]
    try:
        options = Options(
            paths=(*corpus, str(scratch)),
            task=task,
            tokenizer=str(scratch / TOKENIZER_FILE),
            end_token=recipe["--end-token"],
            add_special_tokens=recipe["--add-special-tokens"],
            special_tokens_in_text=recipe["--special-tokens-in-text"],
            field=(_fields(recipe),),
            split=tuple(recipe["--split"]),
            validation=recipe["--validation"],
            exclude=tuple(recipe["--exclude"]),
            shard_size=str(recipe["--shard-size"]),
            max_record=str(recipe["--max-record"]),
            engine=engine,
        )
        options.check()
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged_recipe(folder, error) from error
    return options


def _damaged_recipe(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{folder / MADE_BY_FILE}: does not say by what options the data set was made ({error}). "
        "Copy that file from where it was made, or repair by `--from MIRROR`."
    )


def _fields(recipe: _Recipe) -> tuple[str, ...]:
    """`--field` for the fields that were read: all of a task's own, or those it reads by itself.

    The recipe has only the names that records have for them, in the task's order.
    """
    name: Any = recipe["--task"]
    names, task = recipe["the fields"], TASK_CLASSES[name]
    own = task.kinds if len(names) == len(task.kinds) else task().named
    return tuple(f"{each}={name}" for each, name in zip(own, names, strict=True))


def _check_same(inputs: Inputs, manifest: Manifest, recipe: _Recipe) -> None:
    """Refuse another corpus before anything of it is encoded, as far as sizes tell."""
    sources = inputs.corpus.sources
    for what, was, now in (
        ("input files", manifest.ledger.files, len(sources)),
        ("bytes", recipe["the bytes of the input"], sum(source.bytes for source in sources)),
    ):
        if was != now:
            raise CorpusError(
                f"the corpus has {now:,} {what}, that of the data set had {was:,}. Give the same "
                "folders and files, in the same order."
            )


def _encoded(
    settings: EncodeSettings,
    inputs: Inputs,
    shards: list[ShardInfo],
    folder: Path,
    manifest: Manifest,
) -> list[str]:
    """Encode the units of some shards, and put into place what is right; what is not."""
    wanted: dict[int, list[ShardInfo]] = defaultdict(list)
    for info in shards:
        wanted[int(Path(info.file).stem)].append(info)
    units = [unit for unit in inputs.units if unit.number in wanted]
    problems: list[str] = []
    with Bar(units) as bar:
        try:
            worker = Worker(lambda on_progress: UnitEncoder(settings, on_progress).encode)
        except EngineRejected as why:
            raise ConfigError(
                f"{settings.engine} has made the data set, and here {why}. Install "
                f"{_engine_of(manifest)}."
            ) from None
        worker.on_progress = bar.advance
        for unit in units:
            made = worker.do(unit).result.shards
            for info in wanted.pop(unit.number):
                right = info in made.values()
                if right:
                    _replace(Path(settings.output.path(info.file)), folder / info.file)
                else:
                    problems.append(_other_bytes(folder, info, manifest))
            bar.count_unit()
    lost = [info for infos in wanted.values() for info in infos]
    return problems + [_other_bytes(folder, info, manifest) for info in lost]


def _replace(made: Path, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    os.replace(made, path)
    sync_folder(path.parent)


def _other_bytes(folder: Path, info: ShardInfo, manifest: Manifest) -> str:
    here = f"{manifest.tokenizer.engine} {engine_version(_name(manifest))}"
    why = "the corpus has changed, or pyarrow"
    if here != _engine_of(manifest):
        why = f"it was made by {_engine_of(manifest)}, and here is {here}"
    return f"{folder / info.file}: comes out with other bytes: {why}. Left as it is."


def _engine_of(manifest: Manifest) -> str:
    return f"{manifest.tokenizer.engine} {manifest.tokenizer.engine_version}"


def _name(manifest: Manifest) -> Any:
    return manifest.tokenizer.engine
