"""Pairs of conversations as DPO trainers take them: a prompt, and a chosen and a rejected answer.

    rows = datasets.Dataset.from_generator(lambda: preference_pairs("pairs/"))

`pretokenize --task chat` has rendered and tokenized both.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.kinds import REJECTED, TargetRule, Targets
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import KINDS, Rows
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.format.store import open_store


def preference_pairs(
    data_set: str | Path, split: str = "train", *, targets: Targets = "last"
) -> Iterator[dict[str, list[int]]]:
    """Yield `prompt_ids`, `chosen_ids` and `rejected_ids` of each row, in the order of the shards.

    The prompt has the tokens that both conversations begin with, up to the first target of either.

    Args:
        data_set: A data set of pairs, here or in a store.
        split: The split to read.
        targets: What a conversation must learn; see `Targets`.

    Raises:
        ConfigError: The data set has no pairs.
    """
    store = open_store(str(data_set))
    manifest = Manifest.read(store)
    if manifest.task != "chat":
        raise ConfigError(
            f"{store.name}: has no pairs, because its task is {manifest.task}. Make it from "
            "records with chosen and rejected, by `pretokenize --task chat`."
        )
    rule = TargetRule.from_setting(targets, manifest.columns)
    if rule is None:
        raise ConfigError(f"{store.name}: has no pairs, or `targets` has no prompt ({targets!r}).")
    for info in manifest.split(split).shards:
        reader = ShardReader.open(store, manifest, info)
        for batch in range(info.batches):
            rows, _ = reader.read(batch)
            yield from _pairs(rows, rule, f"{info.file}, record batch {batch}")


def _pairs(rows: Rows, rule: TargetRule, place: str) -> Iterator[dict[str, list[int]]]:
    kinds = rows.per_token[KINDS]
    is_rejected = (kinds & REJECTED) != 0
    begins = np.cumsum(rows.lengths) - rows.lengths
    rejected = np.add.reduceat(is_rejected, begins, dtype=np.int64)
    lengths = np.stack([rows.lengths - rejected, rejected], axis=1).reshape(-1)
    if not lengths.all():
        raise ConfigError(
            f"{place}: has a row that is no pair. Make the data set from records with chosen and "
            "rejected, by `pretokenize --task chat`."
        )
    mask = rule.mask(kinds & ~REJECTED, lengths)
    halves, masks = (np.split(each, np.cumsum(lengths)[:-1]) for each in (rows.ids, mask))
    for first in range(0, len(halves), 2):
        chosen, other = halves[first : first + 2]
        shortest = min(len(chosen), len(other))
        is_same = np.append(chosen[:shortest] == other[:shortest], False)
        ends = (
            int(np.argmin(is_same)),
            *(int(np.argmax(np.append(each, True))) for each in masks[first : first + 2]),
        )
        prompt = min(ends)
        yield {
            "prompt_ids": chosen[:prompt].tolist(),
            "chosen_ids": chosen[prompt:].tolist(),
            "rejected_ids": other[prompt:].tolist(),
        }
