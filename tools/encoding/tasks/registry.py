"""The tasks, by the value of `--task`."""

from typing import Literal

from tokenfeed.tools.encoding.tasks.base import TaskEncoder
from tokenfeed.tools.encoding.tasks.chat import ChatEncoder
from tokenfeed.tools.encoding.tasks.classify import ClassifyEncoder
from tokenfeed.tools.encoding.tasks.complete import CompleteEncoder
from tokenfeed.tools.encoding.tasks.ids import IdsEncoder
from tokenfeed.tools.encoding.tasks.lm import LmEncoder
from tokenfeed.tools.encoding.tasks.score import ScoreEncoder
from tokenfeed.tools.encoding.tasks.tag import TagEncoder

TaskName = Literal["lm", "classify", "score", "tag", "complete", "chat", "ids"]
"""The values of `--task`."""

_CLASSES: tuple[type[TaskEncoder], ...] = (
    *(LmEncoder, ClassifyEncoder, ScoreEncoder, TagEncoder, CompleteEncoder, ChatEncoder),
    IdsEncoder,
)

TASK_CLASSES: dict[str, type[TaskEncoder]] = {task.option: task for task in _CLASSES}
"""The tasks by the value of `--task`."""
