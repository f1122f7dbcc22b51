"""What the help of `pretokenize` says of formats and tasks: all that are registered, in their own
words."""

from collections.abc import Iterator

from tokenfeed.tools.corpus.formats.registry import FALLBACK, FORMATS
from tokenfeed.tools.encoding.task import TaskEncoder
from tokenfeed.tools.encoding.tasks import TASK_CLASSES

__all__ = ["fields_of_tasks", "input_formats", "records_of_tasks"]


def input_formats() -> str:
    """What a corpus may consist of, by the first ending of each format."""
    formats = [format_ for format_ in FORMATS.values() if format_ is not FALLBACK]
    lines = [format_.endings[0] for format_ in formats if format_.is_compressible]
    others = [format_.endings[0] for format_ in formats if not format_.is_compressible]
    return (
        f"Input: text and source files (a file is a document), {', '.join(lines)}, each also .gz, "
        f".zst, .bz2 or .xz; {', '.join(others)}, folders of `save_to_disk`; - for standard input; "
        "hub:OWNER/NAME[@REVISION]; hf://datasets/OWNER/NAME[@REVISION][/PATH]."
    )


def records_of_tasks() -> str:
    """What a record is to each task."""
    return "; ".join(f"{name}: {task.record}" for name, task in TASK_CLASSES.items()) + "."


def fields_of_tasks() -> str:
    """The fields that each task reads, in brackets those that it reads only if they are named."""
    said = (f"{name}: {', '.join(_fields(task))}" for name, task in TASK_CLASSES.items())
    return "; ".join(said) + "."


def _fields(task: type[TaskEncoder]) -> Iterator[str]:
    read = task().named
    return (own if own in read else f"[{own}]" for own in task.kinds)
