"""Source lines of the user: where a block of time came from, and which setting repeats it."""

import ast
import functools
import linecache
import os
import sysconfig
from types import FrameType
from typing import NamedTuple

_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    }
)
_MOST = 6
"""Most lines that a place keeps, from the innermost function outwards."""
FRAMEWORKS = {
    "transformers.trainer": {
        "data": "raise `dataloader_num_workers` of `TrainingArguments`",
        "evaluation": "raise `eval_steps` of `TrainingArguments`",
        "checkpoint": "raise `save_steps` of `TrainingArguments`",
        "log": "raise `logging_steps` of `TrainingArguments`",
    },
    "lightning.pytorch": {
        "evaluation": "raise `val_check_interval` of `Trainer`, or set `limit_val_batches`",
        "checkpoint": "raise `every_n_train_steps` of `ModelCheckpoint`",
        "log": "raise `log_every_n_steps` of `Trainer`",
    },
}
FRAMEWORKS["pytorch_lightning"] = FRAMEWORKS["lightning.pytorch"]
"""The settings of trainers, by the module of their loop and by cause."""


class Place(NamedTuple):
    """A line of source code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


class Site(NamedTuple):
    """Where a block of time came from."""

    places: tuple[Place, ...]
    """Lines of the user, innermost first."""
    framework: str
    """The trainer that called it; empty for a loop of the user."""


@functools.cache
def is_library(file: str) -> bool:
    """Return whether a file belongs to Python, to an installed package or to tokenfeed."""
    return file.startswith(("<frozen", *_LIBRARIES))


def site_of(frame: FrameType | None) -> Site:
    """Return the lines of the user in a stack."""
    places: list[Place] = []
    framework = ""
    while frame is not None and len(places) < _MOST:
        name, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
        if name == "__main__" or not is_library(file):
            places.append(Place(file, frame.f_lineno))
        elif not framework and not places:
            framework = next((each for each in FRAMEWORKS if name.startswith(each)), "")
        frame = frame.f_back
    return Site(tuple(places), framework)


def interval_of(places: tuple[Place, ...]) -> tuple[str, Place] | None:
    """Return what decides how often a line runs: `eval_interval` of `if step % eval_interval == 0`.

    The innermost `if` with a remainder that encloses one of the lines counts.
    """
    for place in places:
        for node in reversed(_remainders(place.file)):
            if node.body[0].lineno <= place.line <= (node.body[-1].end_lineno or 0):
                return ast.unparse(_divisors(node)[0]), Place(place.file, node.lineno)
    return None


def _divisors(node: ast.If) -> list[ast.expr]:
    """Return `b` of each `a % b` in the condition."""
    found = [each for each in ast.walk(node.test) if isinstance(each, ast.BinOp)]
    return [each.right for each in found if isinstance(each.op, ast.Mod)]


@functools.cache
def _remainders(file: str) -> list[ast.If]:
    """Return the `if` statements of a file that test a remainder, in order."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    ifs = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    return sorted(filter(_divisors, ifs), key=lambda node: node.lineno)
