"""Language modelling: a text becomes ids."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from tokenfeed.pipeline.format.schema import INPUT_IDS
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.encoding.fim import FIM_ROWS, FillInMiddle
from tokenfeed.tools.encoding.tasks.base import Encode, Samples, TaskEncoder, Values
from tokenfeed.tools.encoding.template import Template
from tokenfeed.tools.encoding.tokenizer import TextTokenizer


@dataclass(frozen=True, kw_only=True)
class LmEncoder(TaskEncoder):
    """Language modelling: a document is a row."""

    option = "lm"
    record = "a document"
    kinds: ClassVar = {"text": FieldKind.TEXT}
    fim: FillInMiddle | None = None
    """Cuts some documents in three; None: none."""

    def with_tokenizer(self, json_bytes: bytes) -> Self:
        """Return the task with the ids of the tokens to fill in the middle."""
        return replace(self, fim=self.fim.with_tokenizer(json_bytes)) if self.fim else self

    def template(self, tokenizer: TextTokenizer) -> Template:
        """Return the special tokens around the texts of a row. Check that the tokenizer has those
        of FIM."""
        self.with_tokenizer(tokenizer.json_bytes)
        return super().template(tokenizer)

    def encode(self, values: Values, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows."""
        if self.fim is None:
            ids = encode(values["text"])
            return Samples({INPUT_IDS: template.around(ids)}, {}, ids.lengths > 0)
        ids, own, is_cut = self.fim.encode(values["text"], encode)
        counts = {FIM_ROWS: is_cut.astype(np.int64)}
        return Samples({INPUT_IDS: template.around(ids)}, {}, own > 0, counts=counts)
