"""Read a command line with tyro: the options that the user wrote, and nothing else.

Options are the fields of a dataclass, whose docstrings are their help. tyro finds the words of each
option and prints the help. `setting_of` converts the words, as it converts the settings in a file.
"""

import ast
import dataclasses
import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

import tyro

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools.shell.console import parse_words
from tokenfeed.trainer.config.values import Shards, empty, flag_of, kinds_of, nearest, setting_of

__all__ = ["read_command_line"]

_typed_dict: Any = TypedDict
"""Type checkers reject a TypedDict whose fields are known only at run time."""


def read_command_line(
    options: type[Any],
    groups: Mapping[str, Sequence[str]],
    prog: str,
    description: str,
    *,
    paths: str = "",
    reversible: Collection[str] = (),
    other_names: Mapping[str, str] | None = None,
    more_help: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the options on the command line by field. --help prints the help and exits.

    Args:
        options: The dataclass. Its field `paths`, if any, takes the words without an option.
        groups: The fields that are options, by the title of their group in the help.
        prog: Name of the command.
        description: What the help says above the options.
        paths: What the help calls the words without an option. Empty: reject such words.
        reversible: Switches that `--no-NAME` turns off, because a file may turn them on.
        other_names: What other tools call an option, with the options to suggest instead. The empty
            name is for a word without an option.
        more_help: Help that is known only at run time, by field. It follows the docstring.

    Raises:
        ConfigError: An unknown option, or a value that its option does not take.
    """
    kinds = get_type_hints(options, include_extras=True)
    help_of = _helps(options, more_help or {})
    boxes: dict[str, Any] = {}
    absent: dict[str, Any] = {}
    """What tyro returns for options that are not on the command line, unless it leaves them out."""
    if paths:
        shown = tyro.conf.arg(metavar=paths, help=help_of["paths"], help_behavior_hint="")
        boxes["paths"] = tyro.conf.Positional[Annotated[tuple[str, ...], shown]]
    for title, names in groups.items():
        fields = {name: _option(kinds[name], help_of[name], name in reversible) for name in names}
        box = _typed_dict(title, fields, total=False)
        boxes[title] = Annotated[box, tyro.conf.arg(name=title)]
        absent[title] = {name: False for name in names if kinds[name] is bool}
        absent[title] |= {name: () for name in names if get_origin(kinds[name]) is tuple}
        for name in reversible:
            absent[title].pop(name, None)
    found, others = parse_words(
        lambda: tyro.cli(
            _typed_dict(prog, boxes, total=False),
            prog=prog,
            description=description,
            default=absent,
            return_unknown_args=True,
        )
    )
    known = {flag_of(name): kinds[name] for names in groups.values() for name in names}
    _check_words(others, known, prog, takes_paths=bool(paths), other_names=other_names or {})
    given: dict[str, Any] = {"paths": (*found.get("paths", ()), *others)} if paths else {}
    for title in groups:
        for name, words in found[title].items():
            if name not in absent[title] or words != absent[title][name]:
                given[name] = _value(kinds[name], words, f"`{flag_of(name)}`")
    return given


def _check_words(
    others: list[str],
    known: Mapping[str, Any],
    prog: str,
    *,
    takes_paths: bool,
    other_names: Mapping[str, str],
) -> None:
    """Reject unknown options, values of switches, and words unless the command takes paths."""
    for word in sys.argv[1:]:
        flag, equals, _ = word.partition("=")
        if equals and known.get(flag.replace("_", "-")) is bool:
            raise ConfigError(f"`{word}`: {flag} takes no value. See {prog} --help.")
    for word in others:
        flag = word.split("=")[0]
        if word.startswith("-") and word != "-":
            other = other_names.get(flag)
            meant = f" Did you mean {other}?" if other else nearest(flag, known)
            raise ConfigError(f"Unknown option `{flag}`.{meant} See {prog} --help.")
        if not takes_paths:
            other = other_names.get("")
            meant = f" Did you mean {other} {word}?" if other and other not in sys.argv else ""
            raise ConfigError(f"`{word}`: unexpected word.{meant} See {prog} --help.")


def _option(kind: Any, doc: str, is_reversible: bool) -> Any:
    """The type by which tyro takes an option as a switch, a word, or several words."""
    metavar = None if kind is bool else _placeholder(kind)
    shown = tyro.conf.arg(help=doc, metavar=metavar, prefix_name=False, help_behavior_hint="")
    if kind is bool:
        switch = Annotated[bool, shown]
        return switch if is_reversible else tyro.conf.FlagCreatePairsOff[switch]
    if get_origin(kind) is tuple:  # each time that the option is given adds a value
        inner: Any = tuple[str, ...] if get_origin(get_args(kind)[0]) is tuple else str
        return tyro.conf.UseAppendAction[Annotated[tuple[inner, ...], shown]]
    takes_words = bool in kinds_of(kind) or Shards in kinds_of(kind)
    return Annotated[tuple[str, ...] if takes_words else str, shown]


def _value(kind: Any, words: Any, flag: str) -> Any:
    """The value that the words of an option mean."""
    if kind is bool:
        return words
    if bool in kinds_of(kind) and len(words) < 2:  # a switch that may have a word
        return setting_of(kind, words[0], flag) if words else True
    value = setting_of(kind, list(words) if isinstance(words, tuple) else words, flag)
    if value == "":
        raise empty(kind, flag)
    return value


def _placeholder(kind: Any) -> str:
    """What stands for a value in the help."""
    if get_origin(kind) is tuple:
        return _placeholder(get_args(kind)[0])
    if get_origin(kind) is Annotated:
        return str(kind.__metadata__[0].title)
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if kind in (str, Path):
        return "PATH" if kind is Path else "TEXT"
    optional = bool in (kinds := kinds_of(kind))
    shown = "|".join(_placeholder(each) for each in kinds if each is not bool)
    return f"[{shown}]" if optional else shown


def _helps(options: type[Any], more: Mapping[str, str]) -> dict[str, str]:
    """The help of each field: the docstring below it, and its default."""
    found: dict[str, str] = {}
    for cls in reversed(options.__mro__[:-1]):
        (definition,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(definition, ast.ClassDef)
        for one, below in pairwise(definition.body):
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                assert isinstance(below, ast.Expr)
                found[one.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    for field in dataclasses.fields(options):
        found[field.name] += more.get(field.name, "")
        if not (field.default in (None, (), dataclasses.MISSING) or field.default is False):
            found[field.name] += f" Default: {field.default}."
    return found
