"""The data of a run: one data set, or several with weights; and how rows become micro-batches.

Several data sets are read as one `Mixture` and evaluated one by one. For defaults and plans, they
have one manifest, which describes an epoch of the mixture.

Rows are packed into sequences of one length, or padded. With --compile, the model is compiled for
each shape. So padded lengths are multiples of a large step, and a micro-batch with too few rows is
filled up: all shapes are known before training.

Example: --sequence-length 100 --micro-batch-tokens 1024 --compile makes 64 rows of length 16, 32
rows of length 32, ..., 10 rows of length 96, 9 rows of length 112.

`epoch_of` estimates the steps and micro-batches of an epoch from the manifest alone: it draws
rows with the lengths in the manifest, then cuts, sorts and packs them as one window. Imports no
torch.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple, Self

from tokenizers import Tokenizer

from tokenfeed.pipeline.arithmetic import ceil_div, round_up
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.data_set import decode_tokenizer, open_splits
from tokenfeed.pipeline.format.manifest import Manifest, SplitInfo, read_checked
from tokenfeed.pipeline.format.schema import column_of
from tokenfeed.pipeline.format.store import StorePath, open_store
from tokenfeed.pipeline.planning.batching import plan_window
from tokenfeed.pipeline.planning.estimates import likely_lengths
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.pipeline.planning.policies import (
    Batching,
    Fixed,
    Last,
    LongRows,
    Packed,
    Padded,
    random_order,
)
from tokenfeed.pipeline.planning.schedule import Draw
from tokenfeed.pipeline.planning.stages import Stage
from tokenfeed.pipeline.text import public
from tokenfeed.trainer.config.run_config import MOST_SHAPES, TrainConfig, check_multiple
from tokenfeed.trainer.config.values import Shards


def weights_of(shards: Shards) -> dict[str, float]:
    """Return the weight of each data set by its folder: of several that are read as one, the number
    of its tokens."""
    if isinstance(shards, str):
        return {shards: 1.0}
    if isinstance(shards, dict):
        return shards
    sizes = ((folder, Manifest.read(folder).split("train").tokens) for folder in shards)
    return {folder: float(tokens) for folder, tokens in sizes}


def source_of(shards: Shards) -> str | Mixture:
    """Return what a loader reads: a folder, or a mixture.

    Raises:
        ConfigError: A weight is not above 0.
    """
    if isinstance(shards, tuple):
        return Mixture(shards)
    weights = weights_of(shards)
    return Mixture(dict(weights.items())) if len(weights) > 1 else first_of(shards)


def training_source(
    config: TrainConfig, policy_of: Callable[[int], Batching | None] = lambda _: None
) -> str | Mixture | list[Stage]:
    """Return what the loader of the training data reads.

    Args:
        config: The settings of the run.
        policy_of: Returns the policy of stages with this length of sequences.

    Raises:
        ConfigError: Stages contradict each other.
    """
    if not config.mixing:
        return source_of(config.shards)

    def weights(shards: Shards) -> dict[StorePath, float]:
        return dict(weights_of(shards).items())

    return [
        Stage(
            weights(each.shards),
            until_tokens=each.until_tokens,
            batching=None if each.sequence_length is None else policy_of(each.sequence_length),
            targets=each.targets,
        )
        for each in config.mixing
    ]


def first_of(shards: Shards) -> str:
    """Return the first folder. Its tokenizer serves for all data sets."""
    return shards if isinstance(shards, str) else next(iter(shards))


def shown(shards: Shards) -> str:
    """Return the setting as it is written on the command line, without secrets."""
    if isinstance(shards, str):
        return public(shards)
    if isinstance(shards, tuple):
        return " ".join(map(public, shards))
    return " ".join(f"{public(folder)}={weight:g}" for folder, weight in shards.items())


def read_manifest(shards: Shards) -> Manifest:
    """Return the manifest of a data set, or of an epoch of several.

    Raises:
        ManifestError: A manifest is missing, or one of several data sets has no train split.
        ConfigError: The data sets do not fit each other, or a weight is not above 0.
    """
    return DataSets.read(shards).manifest


def read_tokenizer(shards: StorePath) -> bytes:
    """Return the tokenizer.json that made the shards of a data set.

    Raises:
        ManifestError: The file cannot be read, or its checksum differs from that in the manifest.
    """
    return read_checked(open_store(shards), Manifest.read(shards).tokenizer)


def open_tokenizer(shards: StorePath) -> Tokenizer:
    """Return the tokenizer that made the shards of a data set.

    Raises:
        ManifestError: The file cannot be read, or its checksum differs from that in the manifest.
        ConfigError: The file is not a tokenizer.
    """
    return as_tokenizer(read_tokenizer(shards), shards)


def as_tokenizer(content: bytes, where: object) -> Tokenizer:
    """Decode a tokenizer.json. `where` names its place in the error.

    Raises:
        ConfigError: The file is not a tokenizer.
    """
    try:
        return decode_tokenizer(content)
    except ValueError as error:
        raise ConfigError(f"{where}: tokenizer.json cannot be decoded ({error}).") from error


def read_chat_template(shards: StorePath) -> bytes | None:
    """Return the chat template of a data set of conversations; None for other data sets.

    Raises:
        ManifestError: The file cannot be read, or its checksum differs from that in the manifest.
    """
    info = Manifest.read(shards).chat_template
    return read_checked(open_store(shards), info) if info else None


def run_manifest(config: TrainConfig) -> Manifest:
    """Return the manifest of a run. Its longest row is the longest of all stages.

    Raises:
        ConfigError: The data sets of a stage do not fit the first one.
    """
    manifest, first = read_manifest(config.shards), first_of(config.shards)
    longest = 0
    for shards in config.all_shards[1:]:
        data = DataSets.read(shards)
        for folder, other in zip(data.weights, data.manifests, strict=True):
            if other.fingerprint != Manifest.read(first).fingerprint:  # ids or labels may differ
                open_splits([first, folder], "train")
        longest = max(longest, data.manifest.split("train").longest_row)
    train = manifest.splits.get("train")
    if train is None or longest <= train.longest_row:
        return manifest
    shard = dataclasses.replace(train.shards[0], longest_row=longest)
    longer = dataclasses.replace(train, shards=(shard, *train.shards[1:]))
    return dataclasses.replace(manifest, splits=manifest.splits | {"train": longer})


@dataclass(frozen=True, slots=True)
class DataSets:
    """The data sets of a run, with their manifests."""

    weights: dict[str, float]
    """Weights by folder."""
    manifests: tuple[Manifest, ...]
    """The manifest of each folder, in the same order."""

    @classmethod
    def read(cls, shards: Shards) -> Self:
        """Read the manifests. Raises the errors of `read_manifest`."""
        source = source_of(shards)
        if not isinstance(source, Mixture):
            return cls({source: 1.0}, (Manifest.read(source),))
        weights = weights_of(shards)
        opened = open_splits(weights, "train")
        return cls(weights, tuple(each.manifest for each in opened))

    @property
    def manifest(self) -> Manifest:
        """One manifest for all data sets: the first one, with the splits of all.

        Its train split describes an epoch: the data set that lasts longest once, the others as
        often as that takes.
        """
        first = self.manifests[0]
        if len(self.manifests) == 1:
            return first
        names = dict.fromkeys(name for manifest in self.manifests for name in manifest.splits)
        return dataclasses.replace(first, splits={name: self._together(name) for name in names})

    @property
    def names(self) -> dict[str, str]:
        """A name of each folder: its last part, or the whole path if two folders end alike."""
        lasts = {folder: PurePath(public(folder)).name for folder in self.weights}
        known = list(lasts.values())
        return {
            folder: last if known.count(last) == 1 else public(folder)
            for folder, last in lasts.items()
        }

    def manifest_of(self, folder: str) -> Manifest:
        """Return the manifest of one data set."""
        return self.manifests[[*self.weights].index(folder)]

    def having(self, split: str) -> list[str]:
        """Return the folders of the data sets that have a split."""
        pairs = zip(self.weights, self.manifests, strict=True)
        return [folder for folder, manifest in pairs if split in manifest.splits]

    def _together(self, name: str) -> SplitInfo:
        splits = [each.splits[name] for each in self.manifests if name in each.splits]
        times = [1.0] * len(splits)
        if name == "train":
            lasting = [
                split.tokens / weight
                for split, weight in zip(splits, self.weights.values(), strict=True)
            ]
            times = [max(lasting) / each for each in lasting]
        read = [_read(split, often) for split, often in zip(splits, times, strict=True)]
        histograms = zip(*(split.length_histogram for split in read), strict=True)
        return SplitInfo(
            shards=tuple(shard for split in read for shard in split.shards),
            length_histogram=tuple(map(sum, histograms)),
        )


def _read(split: SplitInfo, times: float) -> SplitInfo:
    """Return the figures of reading a split several times, as if it were one shard."""
    counts = tuple(round(times * count) for count in split.length_histogram)
    shard = dataclasses.replace(
        split.shards[0],
        rows=sum(counts),
        tokens=round(times * split.tokens),
        batches=round(times * split.batches),
        longest_row=split.longest_row,
    )
    return SplitInfo(shards=(shard,), length_histogram=counts)


Policy = Packed | Padded | Fixed

_TILE = 8  # lengths are multiples of the tiles of tensor cores


def is_packed(config: TrainConfig, manifest: Manifest) -> bool:
    """Return whether a run packs its rows. Otherwise it pads them.

    By default, rows are padded if rows or words have labels.
    """
    if config.batching == "auto":
        return column_of(manifest.columns, "target") is None
    return config.batching == "packed"


def long_rows_of(config: TrainConfig, manifest: Manifest) -> LongRows:
    """Return what to do with rows longer than --sequence-length.

    Rows with prompts are truncated: a later piece would have targets without their prompt. Other
    rows are cut into pieces.
    """
    has_prompts = column_of(manifest.columns, "context") is not None
    longest = max(split.longest_row for split in manifest.splits.values())
    return "truncate" if has_prompts and longest > config.sequence_length else "cut"


def make_policy(
    config: TrainConfig, *, packed: bool, on_gpu: bool, long_rows: LongRows = "cut"
) -> Policy:
    """Return the batching policy of a run's loader.

    Args:
        config: Settings with the size of micro-batches.
        packed: Whether rows are packed.
        on_gpu: Whether padded lengths must suit tensor cores.
        long_rows: The result of `long_rows_of`.

    Raises:
        ConfigError: Sequences of --sequence-length do not fill a micro-batch.
    """
    last: Last = "fill" if config.compile else "short"
    if packed:
        check_multiple(config, "micro_batch_tokens", "sequence_length")
        return Packed(
            config.sequence_length,
            config.rows,
            long_rows=long_rows,
            last=last,
            balance_attention=config.balance_attention,
        )
    multiple_of = _TILE if on_gpu else 1
    if config.compile:
        multiple_of = round_up(ceil_div(config.sequence_length, MOST_SHAPES), _TILE)
    if config.step_rows is not None:
        return Fixed(config.rows, multiple_of=multiple_of, last=last)
    return Padded(
        config.micro_batch_slots,
        multiple_of=multiple_of,
        long_rows=long_rows,
        sequence_length=min(config.sequence_length, config.micro_batch_slots),
        last=last,
    )


_MOST_ROWS = 100_000
"""Rows to sample at most."""


class Epoch(NamedTuple):
    """Estimated figures of an epoch."""

    steps: float
    """Optimizer steps. The last one of a window may have fewer micro-batches than the others."""
    tokens: float
    """Real tokens. Truncated rows lose some."""


def epoch_of(config: TrainConfig, manifest: Manifest, *, on_gpu: bool) -> Epoch:
    """Estimate the steps and tokens of an epoch from the manifest.

    Cost: as much as planning a window.
    """
    packed = is_packed(config, manifest)
    if config.micro_batch_tokens == "auto":  # a step has the same rows with any number
        if packed and config.step_rows is None:
            check_multiple(config, "step_tokens", "sequence_length")
        rows = (config.step_rows or 0) * config.sequence_length
        config = dataclasses.replace(config, micro_batch_tokens=rows or config.step_tokens)
    long_rows = long_rows_of(config, manifest)
    policy = make_policy(config, packed=packed, on_gpu=on_gpu, long_rows=long_rows)
    split = manifest.split("train")
    sampled = min(split.rows, _MOST_ROWS)
    draw = Draw(config.seed, config.seed, 0, num_windows=1)
    lengths = likely_lengths(split, sampled)
    order = random_order(sampled, config.seed) if config.order == "file" else None
    plan = plan_window(lengths, policy, step_size=config.accumulation, draw=draw, rows=order)
    return Epoch(
        steps=split.rows / sampled * (len(plan.step_offsets) - 1),
        tokens=split.tokens * int(plan.cut.lengths[plan.pieces].sum()) / int(lengths.sum()),
    )


def expected_targets(config: TrainConfig, manifest: Manifest, *, per_row: bool) -> float:
    """Estimate the targets of a step: its rows if each has one, else its tokens. Rounded to a power
    of two, so that dividing by it rounds nothing."""
    epoch = epoch_of(config, manifest, on_gpu=False)
    of_epoch = manifest.split("train").rows if per_row else epoch.tokens
    return float(2.0 ** round(math.log2(max(1.0, of_epoch / epoch.steps))))


def knows_steps(config: TrainConfig, manifest: Manifest) -> bool:
    """Return whether the steps of an epoch do not depend on the order of rows in the data set."""
    shuffled = config.order == "shuffled"
    return shuffled or config.step_rows is not None or is_packed(config, manifest)
