"""Open data sets for reading: a store, its manifest and one split.

The data sets of a mixture are opened together; ids and labels must have the same meaning in all of
them. No shard is opened here. Torch-free.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.format.manifest import Manifest, SplitInfo
from tokenfeed.pipeline.format.schema import is_kept
from tokenfeed.pipeline.format.store import RangedStore, Store, StorePath, open_store


@dataclass(frozen=True, slots=True)
class OpenedSplit:
    """An opened split of a data set."""

    store: Store
    manifest: Manifest
    split: SplitInfo
    rows: int
    tokens: int
    batches: int
    """Number of record batches. `rows`, `tokens` and `batches` are of the whole split."""

    @classmethod
    def from_manifest(cls, path: StorePath, manifest: Manifest, split: SplitInfo) -> Self:
        """Return a split of the data set with this manifest."""
        sizes = split.rows, split.tokens, split.batches
        return cls(open_store(path), manifest, split, *sizes)

    @property
    def name(self) -> str:
        """The path of the data set as the user gave it, for messages and statistics."""
        return self.store.name


def open_splits(
    paths: Collection[StorePath], split: str, versions: Collection[str] = ()
) -> tuple[OpenedSplit, ...]:
    """Read the manifest of each data set.

    Args:
        paths: Paths of the data sets; several are the sources of a mixture.
        split: Name of the split in each of them.
        versions: Fingerprints of the wanted versions. A data set without any of them is opened as
            it is.

    Raises:
        ManifestError: A data set or its split is missing.
        ConfigError: A split has no rows, or the data sets do not match.
    """
    opened = tuple(_open(path, split, versions) for path in paths)
    for other in opened[1:]:
        refuse_difference((opened[0].name, opened[0].manifest), (other.name, other.manifest))
    return opened


def has_remote(sources: tuple[OpenedSplit, ...]) -> bool:
    """Return whether any source is in a store."""
    stores = {type(source.store): source.store for source in sources}  # a mixture may have 1,000
    return any(isinstance(store, RangedStore) for store in stores.values())


def _open(path: StorePath, split: str, versions: Collection[str]) -> OpenedSplit:
    store = open_store(path)
    manifest = Manifest.read(store).at(store, versions)
    try:
        info = manifest.split(split)
    except ManifestError as error:
        raise ManifestError(f"{store.name}: {error}") from None
    if not info.rows:
        raise ConfigError(
            f"{store.name}: the split `{split}` holds no rows. Run `pretokenize` on more text."
        )
    return OpenedSplit.from_manifest(store, manifest, info)


def refuse_difference(
    first: tuple[str, Manifest], other: tuple[str, Manifest], *, purpose: str = "a mixture"
) -> None:
    """Check that ids and labels have the same meaning in two data sets.

    Args:
        first: Name and manifest of a data set.
        other: Name and manifest of another data set.
        purpose: What the data sets become parts of. For everything but a mixture, the manifest of
            both must also agree on what it has once: the chat template and the special tokens.

    Raises:
        ConfigError: They differ.
    """
    (our_name, ours), (their_name, theirs) = first, other
    facts = [_facts_of(ours), _facts_of(theirs)]
    if purpose != "a mixture":
        facts = [
            {**known, **_facts_of_rows(manifest)}
            for known, manifest in zip(facts, (ours, theirs), strict=True)
        ]
    for (name, left), right in zip(facts[0].items(), facts[1].values(), strict=True):
        if left != right:
            remedy = "Run `pretokenize` with the same settings."
            if name == "tokenizer":
                known = f"{our_name}/{ours.tokenizer.file}"
                remedy = f"Run `pretokenize --tokenizer {known}` on the texts of the other."
            if name == "task" and purpose == "a mixture":
                remedy = "Train on one of them, or write both as prompts and completions."
            raise ConfigError(
                f"{purpose} needs one {name}: {our_name} has {left}, {their_name} has "
                f"{right}. {remedy}"
            )


def _facts_of(manifest: Manifest) -> dict[str, Any]:
    """What ids and labels mean."""
    return {
        "tokenizer": manifest.tokenizer.xxh3,
        "vocabulary size": manifest.tokenizer.vocabulary_size,
        "task": manifest.task,
        "columns": [
            f"{column.name} ({column.dtype})" if is_kept(column.name) else column.name
            for column in manifest.columns
        ],
        "label names": manifest.label_names,
    }


def _facts_of_rows(manifest: Manifest) -> dict[str, Any]:
    """How rows were made of records, as the manifest says for all rows at once."""
    return {
        "types of columns": manifest.columns,
        "end id": manifest.tokenizer.end_id,
        "way to encode special tokens in text": manifest.tokenizer.special_tokens_in_text,
        "template around texts": manifest.tokenizer.special_tokens_added,
        "number of conversations in a row": 1 + ("chosen" in (manifest.fields or {})),
        "chat template": manifest.chat_template and manifest.chat_template.xxh3,
    }
