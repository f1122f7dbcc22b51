"""The data sets of a run taken apart by task; what follows is asked of each task's own.

What has the same task, columns and labels is one task, and read as a mixture. Torch-free.
"""

import dataclasses
from pathlib import PurePath

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.planning.mixture import proportions
from tokenfeed.pipeline.remote.address import public
from tokenfeed.trainer.config import Shards, TrainConfig
from tokenfeed.trainer.data_sets import read_manifest, source_of, weights_of

__all__ = ["config_by_task", "manifests_by_task", "shards_by_task", "shares_by_task"]

_Meaning = tuple[str, tuple[str, ...], tuple[str, ...]]
"""Task, columns and names of labels: equal where data sets can be one."""


def shards_by_task(shards: Shards, run: Shards | None = None) -> dict[str, Shards]:
    """The data sets of each task, by its name: what they are called. One task alone has no name.

    Args:
        shards: Of a run, or of a phase.
        run: Those of the run, which name its tasks; by default `shards`.

    Raises:
        ManifestError: A data set is not there.
        ConfigError: Tokenizers differ, two tasks have one name, the run has not this task, or a
            weight is none that a mixture takes.
    """
    if isinstance(shards, str) and run in (None, shards):
        return {"": shards}
    names = _names(_groups(shards if run is None else run))
    if len(names) == 1:
        return {"": shards}
    found: dict[str, Shards] = {}
    for meaning, weights in _groups(shards).items():
        first = next(iter(weights))
        if meaning not in names:
            raise ConfigError(
                f"`phases`: {first} is of a task that none of --shards has. Name a data set of it "
                "there too."
            )
        found[names[meaning]] = weights if len(weights) > 1 else first
    return found


def config_by_task(config: TrainConfig) -> dict[str, TrainConfig]:
    """The settings of a run as each of its tasks has them: with its own data sets, also in phases.

    Raises:
        ManifestError, ConfigError: As `shards_by_task`.
    """
    run = config.shards
    tasks = shards_by_task(run)
    if len(tasks) == 1:
        return {"": config}
    phases = [(phase, shards_by_task(phase.shards or run, run)) for phase in config.phases]
    return {
        name: dataclasses.replace(
            config,
            shards=shards,
            phases=tuple(
                dataclasses.replace(phase, shards=found.get(name)) for phase, found in phases
            ),
        )
        for name, shards in tasks.items()
    }


def manifests_by_task(shards: Shards) -> dict[str, Manifest]:
    """What there is to learn for each task; errors are those of `read_manifest` too."""
    return {name: read_manifest(own) for name, own in shards_by_task(shards).items()}


def shares_by_task(shards: Shards, run: Shards | None = None) -> dict[str, float]:
    """Each task's share of the steps: the weight of its data sets."""
    tasks, weights = shards_by_task(shards, run), weights_of(shards)
    shares = dict(zip(weights, proportions(weights.values()), strict=True))
    return {
        name: float(sum(shares[folder] for folder in weights_of(own)))
        for name, own in tasks.items()
    }


def _groups(shards: Shards) -> dict[_Meaning, dict[str, float]]:
    """Weights by folder, by what the data sets mean."""
    weights = _checked(shards)
    manifests = {folder: Manifest.read(folder) for folder in weights}
    groups: dict[_Meaning, dict[str, float]] = {}
    for folder, manifest in manifests.items():
        columns = tuple(column.name for column in manifest.columns)
        meaning = (manifest.task, columns, manifest.label_names)
        groups.setdefault(meaning, {})[folder] = weights[folder]
    if len(groups) > 1:
        _check_tokenizers(manifests)
    return groups


def _checked(shards: Shards) -> dict[str, float]:
    """Weights as a mixture takes them, whether data sets are mixed or have steps of their own."""
    source_of(shards)
    return weights_of(shards)


def _names(groups: dict[_Meaning, dict[str, float]]) -> dict[_Meaning, str]:
    """Last parts of folders, with a + between. Points would divide the names of weights."""
    if len(groups) == 1:
        return dict.fromkeys(groups, "")
    found: dict[str, str] = {}
    for weights in groups.values():
        first = next(iter(weights))
        parts = dict.fromkeys(PurePath(public(folder)).name for folder in weights)
        name = "+".join(parts).replace(".", "_")
        if not name or name in found:
            reason = f"{found[name]} has this name" if name else "its folder has no name"
            raise ConfigError(
                f"`--shards`: the task of {first} cannot be called `{name}`: {reason}. Rename a "
                "folder, for each task's head goes by it."
            )
        found[name] = first
    return dict(zip(groups, found, strict=True))


def _check_tokenizers(manifests: dict[str, Manifest]) -> None:
    first, ours = next((folder, each.tokenizer) for folder, each in manifests.items())
    for folder, manifest in manifests.items():
        theirs = manifest.tokenizer
        if (ours.xxh3, ours.vocabulary_size) != (theirs.xxh3, theirs.vocabulary_size):
            raise ConfigError(
                f"`--shards`: several tasks need one tokenizer, and {first} has {ours.xxh3}, "
                f"{folder} has {theirs.xxh3}. Run `pretokenize` with `--tokenizer "
                f"{PurePath(public(first)) / ours.file}`."
            )
