"""Completion: a prompt and a completion become ids and the length of the prompt."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tokenfeed.pipeline.arithmetic import join
from tokenfeed.pipeline.format.schema import INPUT_IDS, PROMPT_LENGTH, Task
from tokenfeed.tools.corpus.records import FieldKind, Fields
from tokenfeed.tools.encoding.tasks.base import Encode, FieldValues, Samples, TaskEncoder
from tokenfeed.tools.encoding.template import Template


@dataclass(frozen=True, kw_only=True)
class CompleteEncoder(TaskEncoder):
    """Completion: the loss counts the completion, and not the prompt."""

    name: ClassVar[Task] = "complete"
    record: ClassVar[str] = (
        "a prompt (its separator included) and its completion, each encoded on its own"
    )
    kinds: ClassVar[Fields] = {"prompt": FieldKind.TEXT, "completion": FieldKind.TEXT}
    prompt: str = "prompt"
    completion: str = "completion"

    def texts(self, values: FieldValues) -> list[bytes]:
        """Prompts and completions, joined."""
        pairs = zip(values[self.prompt], values[self.completion], strict=True)
        return list(map(b"\n".join, pairs))

    def encode(self, values: FieldValues, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows. They are encoded apart, so that no token spans both."""
        prompt = encode(values[self.prompt])
        completion = encode(values[self.completion])
        whole = join([prompt, completion])
        return Samples(
            {INPUT_IDS: template.around(whole)},
            {PROMPT_LENGTH: (prompt.lengths + len(template.ids[0])).astype(np.uint32)},
            completion.lengths > 0,
        )
