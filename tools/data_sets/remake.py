"""Make shards of a finished data set again: their units, cut and encoded as they once were.

`.made_by.json` says how the data set was made. The caller says where its corpus is now. Only the
bytes that the manifest names take the place of a damaged file.
"""

import os
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
import xxhash

from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.pipeline.format.manifest import (
    MADE_BY_FILE,
    TOKENIZER_FILE,
    FileInfo,
    Manifest,
    ShardInfo,
)
from tokenfeed.pipeline.format.storage import atomic_write, sync_folder
from tokenfeed.pipeline.format.store import LocalStore
from tokenfeed.tools.data_sets.fetch import SCRATCH_PREFIX
from tokenfeed.tools.encoding.engines import EngineRejected, engine_version
from tokenfeed.tools.encoding.tasks import TASK_CLASSES
from tokenfeed.tools.encoding.tokenizer import fetch_tokenizer_json
from tokenfeed.tools.encoding.unit import EncodeSettings, UnitEncoder
from tokenfeed.tools.jobs.claim import made_by
from tokenfeed.tools.jobs.crew import Worker
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.pretokenizing.inputs import Inputs
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.pretokenizing.prepare import Listed, Prepared

__all__ = [
    "remake",
]


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
        f"{folder / info.file}: is made of the whole corpus. Restore it by `--mirror PLACE`."
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
            "file from where the data set was made, or repair by `--mirror PLACE`."
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
        "it again. Restore it by `--mirror PLACE`."
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
            field=(fields_of(recipe),),
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
        "Copy that file from where it was made, or repair by `--mirror PLACE`."
    )


def fields_of(recipe: _Recipe) -> tuple[str, ...]:
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
