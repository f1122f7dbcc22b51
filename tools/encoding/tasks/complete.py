"""Completion: a prompt and a completion become ids and the length of the prompt."""

from typing import ClassVar

import numpy as np

from tokenfeed.pipeline.arithmetic import join
from tokenfeed.pipeline.format.schema import INPUT_IDS, PROMPT_LENGTH
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.encoding.tasks.base import Encode, Samples, TaskEncoder, Values
from tokenfeed.tools.encoding.template import Template


class CompleteEncoder(TaskEncoder):
    """Completion: the loss counts the completion, and not the prompt."""

    option = "complete"
    record = "a prompt (its separator included) and its completion, each encoded on its own"
    kinds: ClassVar = {"prompt": FieldKind.TEXT, "completion": FieldKind.TEXT}

    def encode(self, values: Values, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows. They are encoded apart, so that no token spans both."""
        prompt, completion = encode(values["prompt"]), encode(values["completion"])
        return Samples(
            {INPUT_IDS: template.around(join([prompt, completion]))},
            {PROMPT_LENGTH: (prompt.lengths + len(template.ids[0])).astype(np.uint32)},
            completion.lengths > 0,
        )
