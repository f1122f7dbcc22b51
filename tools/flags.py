"""A command line from a dataclass of settings: what was said, and nothing else.

What is not said is not in the result, so that it can be laid over settings from other places: hence
argparse, for parsers of typed dataclasses fill defaults in. A field's docstring is its help.
"""

import argparse
import ast
import dataclasses
import inspect
import shutil
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.settings import (
    alternatives,
    flag_of,
    is_size,
    nearest,
    parts_of,
    takes_weights,
    typed,
)

__all__ = ["read_flags"]

_WIDEST = 120
_PLACEHOLDERS = {int: "N", float: "X", Path: "PATH"}


def read_flags(
    settings: type[Any],
    groups: Mapping[str, str],
    prog: str,
    description: str,
    other_names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What the command line says, by the names of the fields; --help prints and exits.

    Args:
        settings: A dataclass. Its switches are off by default, and `--no-NAME` turns one off; some
            take a word as well. What has parts is no option: files say it.
        groups: Titles, by the field that a group begins with.
        prog: Name of the command.
        description: What stands above the options.
        other_names: What other tools call an option, with the options to suggest instead. The empty
            name is for a word that is not an option.

    Raises:
        ConfigError: An option that there is not, or one with a value that it does not take.
    """
    hints = get_type_hints(settings, include_extras=True)
    kinds = {name: kind for name, kind in hints.items() if not parts_of(kind)}
    parser = _parser(settings, kinds, groups, prog, description)
    found, others = parser.parse_known_args([_hyphened(word) for word in sys.argv[1:]])
    if others:
        raise ConfigError(_unknown(others[0], kinds, other_names or {}, prog))
    return {name: _typed(kinds[name], said, flag_of(name)) for name, said in vars(found).items()}


def _unknown(word: str, kinds: Mapping[str, Any], other_names: Mapping[str, str], prog: str) -> str:
    """The message about a word that means nothing, with the nearest option."""
    if not word.startswith("-"):
        meant = f" Did you mean {other_names['']} {word}?" if "" in other_names else ""
        return f"`{word}`: unexpected word.{meant} See {prog} --help."
    flag = word.split("=")[0]
    if flag in other_names:
        return f"Unknown option `{flag}`. Did you mean {other_names[flag]}? See {prog} --help."
    return f"Unknown option `{flag}`.{nearest(flag, map(flag_of, kinds))} See {prog} --help."


def _typed(kind: Any, said: Any, flag: str) -> Any:
    """A value as its field has it. An empty word is an accident here; a file may mean it."""
    value = typed(kind, said, f"`{flag}`")
    if value == "":
        raise ConfigError(f"`{flag}` is empty: expected text. Is a shell variable unset?")
    return value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See {self.prog} --help.")


def _parser(
    settings: type[Any], kinds: dict[str, Any], groups: Mapping[str, str], prog: str, about: str
) -> _Parser:
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [options]",
        description=about,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_formatter,
    )
    docs, group = _docs(settings), parser.add_argument_group("options")
    for field in dataclasses.fields(settings):
        if field.name in groups:
            group = parser.add_argument_group(groups[field.name])
        if field.name in kinds:
            _add(group, field, kinds[field.name], docs[field.name])
    return parser


def _add(group: Any, field: "dataclasses.Field[Any]", kind: Any, doc: str) -> None:
    flag, told = flag_of(field.name), doc.replace("%", "%%")
    if bool in (each for each, _ in alternatives(kind)):
        word = {"nargs": "?", "const": True, "metavar": _placeholder(kind)}
        switch = {"action": "store_true"} if kind is bool else word
        group.add_argument(flag, dest=field.name, help=told, **switch)
        off = "--no-" + flag[2:]
        group.add_argument(off, dest=field.name, action="store_false", help=argparse.SUPPRESS)
        return
    if field.default not in (None, dataclasses.MISSING, ()):
        told += f" (default: {field.default})"
    shown: Any = _placeholder(kind)
    more: dict[str, Any] = {}
    if get_origin(kind) is tuple:
        shown, more = (shown, "NAME"), {"nargs": "+", "action": "extend"}
    if takes_weights(kind):
        shown, more = ("PATH", "PATH=X"), {"nargs": "+"}
    group.add_argument(flag, dest=field.name, metavar=shown, help=told, **more)


def _placeholder(kind: Any) -> str:
    """What stands for a value in the help: choices, N or X for numbers, SIZE, else a word."""
    kinds = [each for each in alternatives(kind) if each[0] is not bool]
    return "|".join(
        "SIZE" if is_size(bounds) else _PLACEHOLDERS.get(each, "") or _choices(each)
        for each, bounds in kinds
    )


def _choices(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return _placeholder(get_args(kind)[0])
    return "|".join(get_args(kind)) if get_origin(kind) is Literal else "NAME"


def _docs(settings: type[Any]) -> dict[str, str]:
    """The docstrings below the fields of a dataclass, its bases' included."""
    found: dict[str, str] = {}
    for cls in reversed(settings.__mro__[:-1]):
        (definition,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(definition, ast.ClassDef)
        for one, below in pairwise(definition.body):
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                assert isinstance(below, ast.Expr)
                found[one.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    return argparse.HelpFormatter(prog, max_help_position=34, width=width)


def _hyphened(word: str) -> str:
    """An option that is written with underscores, with hyphens."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word
