"""The inputs of a run: what there is to read, cut into units, and what is to be made of it."""

import dataclasses
from dataclasses import dataclass

from tokenfeed.tools.corpus.sources import Corpus, find_corpus
from tokenfeed.tools.corpus.units import Unit, auto_shard_bytes, cut_units
from tokenfeed.tools.encoding.labels import find_labels
from tokenfeed.tools.encoding.task import Labelled, TaskEncoder
from tokenfeed.tools.encoding.unit import TRAIN, VALIDATION
from tokenfeed.tools.options import Options
from tokenfeed.tools.outputs.output import FolderOutput

__all__ = ["Inputs"]

_DEFAULT_VALIDATION = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Everything that follows from the options and the input, before a tokenizer is known."""

    corpus: Corpus
    shard_bytes: int
    units: tuple[Unit, ...]
    task: TaskEncoder
    """With its labels numbered."""
    validation: float

    @classmethod
    def from_options(cls, options: Options) -> "Inputs":
        """Look at the input.

        Raises:
            CorpusError: There is none, or no label in it.
            ConfigError: It lies in the output folder.
        """
        task, output = options.make_task(), options.output
        corpus = find_corpus(
            options.corpus,
            out=output.folder if isinstance(output, FolderOutput) else None,
            field=next(iter(task.fields)),
            exclude=options.exclude,
            splits=options.splits,
        )
        shard_bytes = options.shard_bytes or auto_shard_bytes(corpus.sources)
        units = cut_units(corpus.sources, shard_bytes)
        validation = options.validation
        if validation is None:
            are_given = any(source.split is not None for source in corpus.sources)
            validation = 0.0 if are_given else _DEFAULT_VALIDATION
        if isinstance(task, Labelled):
            labels = find_labels(
                units, task.fields, task.label_field, task.unusable, own=task.own_label_field
            )
            task = dataclasses.replace(task, labels=labels)
        return cls(
            corpus=corpus, shard_bytes=shard_bytes, units=units, task=task, validation=validation
        )

    @property
    def splits(self) -> tuple[str, ...]:
        """Every split that can get rows."""
        given = {source.split for source in self.corpus.sources if source.split is not None}
        return tuple(sorted({TRAIN, VALIDATION} | given))
