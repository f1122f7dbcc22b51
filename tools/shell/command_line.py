"""Read a command line with tyro: the options that the user wrote, and nothing else.

The options of a command are the fields of a dataclass, whose docstrings are the help. tyro splits
the command line into options and prints the help. `setting_of` converts the words of each option,
as it converts the settings in a file. Every error is one line.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro
from msgspec import Meta

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.facts import facts
from tokenfeed.trainer.config.values import Shards, empty, flag_of, kinds_of, nearest, setting_of

__all__ = [
    "Subcommand",
    "WholeNumber",
    "parse_command",
    "read_command_line",
    "run_subcommand",
    "text",
]

_typed_dict: Any = TypedDict
"""Type checkers reject a TypedDict whose fields are known only at run time."""
OptionsT = TypeVar("OptionsT")
WholeNumber = Annotated[int, Meta(title="N", description="a whole number")]


def text(placeholder: str) -> Meta:
    """Return the metadata of a text: how the help shows its value."""
    return Meta(title=placeholder, description="text")


class Subcommand(Protocol):
    """A dataclass of options with the function that they configure."""

    def run(self) -> int:
        """Run the command and return its exit code."""
        ...


def run_subcommand(prog: str, description: str, commands: Mapping[str, type[Subcommand]]) -> int:
    """Run the command that the first word names, and return its exit code.

    Args:
        prog: Name of the program.
        description: Help text above the list of commands.
        commands: The dataclass of each command, by name.

    Raises:
        ConfigError: The command or one of its options is unknown.
    """
    name, *words = sys.argv[1:] or [""]
    if name in ("-h", "--help"):
        summaries = {each: _summary(kind) for each, kind in commands.items()}
        print(f"usage: {prog} COMMAND ...\n\n{description}\n\n{facts(summaries)}\n")
        print(f"`{prog} COMMAND --help` describes the options of a command.")
        return 0
    if not name:
        raise ConfigError(f"expected a command: {', '.join(commands)}. See {prog} --help.")
    if name not in commands:
        raise ConfigError(f"Unknown command `{name}`.{nearest(name, commands)} See {prog} --help.")
    return parse_command(commands[name], f"{prog} {name}", words).run()


def _summary(command: type[Any]) -> str:
    """Return the first sentence of a command's help."""
    text = str(inspect.getdoc(command)).replace("\n", " ")
    return text.partition(". ")[0].rstrip(".")


def parse_command(options: type[OptionsT], prog: str, words: Sequence[str]) -> OptionsT:
    """Return the dataclass of a command, filled from the words after its name."""
    return options(**read_command_line(options, prog, words=words))


def read_command_line(
    options: type[Any],
    prog: str,
    description: str = "",
    *,
    words: Sequence[str] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    reversible: Collection[str] = (),
    other_names: Mapping[str, str] | None = None,
    more_help: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the options on the command line by field. --help prints the help and exits.

    Args:
        options: The dataclass. Words that belong to no option fill the fields that have no default
            and are in no group, in order.
        prog: Name of the command.
        description: Help text above the options. Default: the docstring of the dataclass.
        words: The words after the command's name. Default: from the command line of this process.
        groups: The fields that are options, by the title of their group in the help. Default: all
            fields that have a default, without a group.
        reversible: Switches that `--no-NAME` turns off, because a file may turn them on.
        other_names: What other tools call an option, with the options to suggest instead. The
            entry with the empty name is suggested for a word that belongs to no option.
        more_help: Help that is known only at run time, by field. It follows the docstring.

    Raises:
        ConfigError: An option is unknown, a word is missing or unexpected, or an option does not
            take its value.
    """
    words = sys.argv[1:] if words is None else words
    kinds = get_type_hints(options, include_extras=True)
    required, optional = _fields(options)
    groups = groups or {"": optional}
    grouped = {name for names in groups.values() for name in names}
    positional = [name for name in required if name not in grouped]
    help_of = _helps(options, more_help or {})
    boxes: dict[str, Any] = {}
    absent: dict[str, Any] = {}
    """What tyro returns for options that are not on the command line, unless it leaves them out."""
    for name in positional:
        shown = tyro.conf.arg(
            metavar=_placeholder(kinds[name]), help=help_of[name], help_behavior_hint=""
        )
        boxes[name] = tyro.conf.Positional[Annotated[tuple[str, ...], shown]]
    for title, names in groups.items():
        fields = {name: _option(kinds[name], help_of[name], name in reversible) for name in names}
        left_out: dict[str, Any] = {name: False for name in names if kinds[name] is bool}
        left_out |= {name: () for name in names if get_origin(kinds[name]) is tuple}
        for name in reversible:
            left_out.pop(name, None)
        if title:
            box = _typed_dict(title, fields, total=False)
            boxes[title] = Annotated[box, tyro.conf.arg(name=title)]
            absent[title] = left_out
        else:
            boxes |= fields
            absent |= left_out
    box = _typed_dict(prog, boxes, total=False)
    found, others = _parsed(
        box, prog, description or str(inspect.getdoc(options)), absent, [*words]
    )
    known = {flag_of(name): kinds[name] for names in groups.values() for name in names}
    _check_words(words, others, known, prog, other_names or {}, takes_words=bool(positional))
    alone = [*(word for name in positional for word in found.get(name, ())), *others]
    given = _positional(alone, {name: kinds[name] for name in positional}, prog)
    for title, names in groups.items():
        in_group, left_out = (found[title], absent[title]) if title else (found, absent)
        for name in names:
            if name in in_group and (name not in left_out or in_group[name] != left_out[name]):
                given[name] = _value(kinds[name], in_group[name], f"`{flag_of(name)}`")
    return given


def _fields(options: type[Any]) -> tuple[list[str], list[str]]:
    """Return the names of the fields without a default, and of those with one."""
    required: list[str] = []
    optional: list[str] = []
    for field in dataclasses.fields(options):
        (required if field.default is dataclasses.MISSING else optional).append(field.name)
    return required, optional


def _parsed(
    box: Any, prog: str, description: str, absent: dict[str, Any], words: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Parse words with tyro. Return the options, and the words that it does not know.

    Raises:
        ConfigError: An option without its value: all other errors of tyro are excluded, since every
            option takes text.
    """
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return tyro.cli(
                box,
                prog=prog,
                description=description,
                args=words,
                default=absent,
                return_unknown_args=True,
                config=[tyro.conf.HelptextFromCommentsOff],  # else it looks for comments in sources
            )
    except SystemExit as ended:
        if not ended.code:  # after --help
            raise
        said = " ".join(re.sub("[│╭╮╰╯─]", " ", shown.getvalue()).split())
        missing = re.search(r"Missing value for argument '(--[\w-]+)", said)
        what = f"`{missing[1]}`: expected a value." if missing else said
        raise ConfigError(f"{what} See {prog} --help.") from None


def _check_words(
    words: Sequence[str],
    others: Sequence[str],
    known: Mapping[str, Any],
    prog: str,
    other_names: Mapping[str, str],
    *,
    takes_words: bool,
) -> None:
    """Reject unknown options, values of switches, and words if the command takes none."""
    for word in words:
        flag, equals, _ = word.partition("=")
        if equals and known.get(flag.replace("_", "-")) is bool:
            raise ConfigError(f"`{word}`: {flag} takes no value. See {prog} --help.")
    for word in others:
        flag = word.split("=")[0]
        if word.startswith("-") and word != "-":
            other = other_names.get(flag)
            meant = f" Did you mean {other}?" if other else nearest(flag, known)
            raise ConfigError(f"Unknown option `{flag}`.{meant} See {prog} --help.")
        if not takes_words:
            other = other_names.get("")
            meant = f" Did you mean {other} {word}?" if other and other not in words else ""
            raise ConfigError(f"`{word}`: unexpected word.{meant} See {prog} --help.")


def _positional(words: list[str], kinds: Mapping[str, Any], prog: str) -> dict[str, Any]:
    """Give the words that belong to no option to the fields that take them.

    Raises:
        ConfigError: A word is empty, missing or unexpected.
    """
    placeholders = " ".join(map(_placeholder, kinds.values()))
    names = placeholders.split()
    if "" in words:
        raise ConfigError(f"a path is empty: expected {placeholders}. Is a shell variable unset?")
    if len(words) < len(names):
        known = f": expected {placeholders}" if len(names) > 1 else ""
        raise ConfigError(f"`{names[len(words)]}` is missing{known}. See {prog} --help.")
    if "..." in placeholders:
        (name,) = kinds
        return {name: tuple(words)}
    if len(words) > len(names):
        raise ConfigError(
            f"`{words[len(names)]}`: unexpected word, expected {placeholders}. See {prog} --help."
        )
    given = zip(kinds.items(), words, strict=True)
    return {name: setting_of(kind, word, _placeholder(kind)) for (name, kind), word in given}


def _option(kind: Any, doc: str, is_reversible: bool) -> Any:
    """Return the type by which tyro reads an option: a switch, one word, or several words."""
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
    """Return the value that the words of an option mean."""
    if kind is bool:
        return words
    if bool in kinds_of(kind) and len(words) < 2:  # a switch that may have a word
        return setting_of(kind, words[0], flag) if words else True
    value = setting_of(kind, list(words) if isinstance(words, tuple) else words, flag)
    if value == "":
        raise empty(kind, flag)
    return value


def _placeholder(kind: Any) -> str:
    """Return what stands for a value in the help."""
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
    """Return the help of each field: the docstring below it, and its default."""
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
