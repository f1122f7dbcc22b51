"""Read a command line: the options that the user wrote, and nothing else.

The options of a command are the fields of a dataclass, whose docstrings are the help. argparse
splits the command line into options and prints the help. `setting_of` converts the words of each
option, as it converts the settings in a file. Every error is one line.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import Meta

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.text import facts
from tokenfeed.tools.shell.console import signals_held
from tokenfeed.trainer.config.values import Shards, empty, flag_of, kinds_of, nearest, setting_of

OptionsT = TypeVar("OptionsT")
WholeNumber = Annotated[int, Meta(title="N", description="a whole number")]


def text(placeholder: str) -> Meta:
    """Return the metadata of a text: how the help shows its value."""
    return Meta(title=placeholder, description="text")


class Page(NamedTuple):
    """What the command line of a dataclass has besides its fields and their docstrings."""

    about: str = ""
    """Help text above the options. Default: the docstring of the dataclass."""
    common: Sequence[str] = ()
    """The fields that --help shows, and --help-all shows all. Empty: --help shows all."""
    groups: Mapping[str, Sequence[str]] = MappingProxyType({})
    """The fields that are options, by the title of their group in the help. Default: all fields
    that have a default, without a group."""
    more: Mapping[str, str] = MappingProxyType({})
    """Help that follows the docstring of a field, by field."""
    examples: str = ""
    """Commands that --help ends with."""
    reversible: Collection[str] = ()
    """Switches that `--no-NAME` turns off, because a file may turn them on."""
    other_names: Mapping[str, str] = MappingProxyType({})
    """What other tools call an option, with the options to suggest instead. The entry with the
    empty name is suggested for a word that belongs to no option."""


_PLAIN = Page()


class Subcommand(Protocol):
    """A dataclass of options with the function that they configure."""

    def run(self) -> int:
        """Run the command and return its exit code."""
        ...


def run_subcommand(
    prog: str,
    about: str,
    commands: Mapping[str, str],
    withdrawn: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run the command that the first argument names, and return its exit code.

    Args:
        prog: Name of the program.
        about: Help text above the list of commands.
        commands: MODULE:CLASS of the dataclass of each command, by name.
        withdrawn: What to do instead of commands that existed before.

    Raises:
        ConfigError: The command or one of its options is unknown.
    """
    name, *words = sys.argv[1:] or [""]
    if name in ("-h", "--help"):
        summaries = {each: _summary(subcommand(place)) for each, place in commands.items()}
        print(f"usage: {prog} COMMAND ...\n\n{about}\n\n{facts(summaries)}\n")
        print(f"`{prog} COMMAND --help` describes the options of a command.")
        return 0
    if not name:
        raise ConfigError(f"expected a command: {', '.join(commands)}. See {prog} --help.")
    for use in (name, *(f"{name} {word}" for word in words)):
        if use in withdrawn:
            raise ConfigError(f"`{prog} {use}` was withdrawn. {withdrawn[use]}")
    if name not in commands:
        raise ConfigError(f"Unknown command `{name}`.{nearest(name, commands)} See {prog} --help.")
    return parse_command(subcommand(commands[name]), f"{prog} {name}", words).run()


def subcommand(place: str) -> type[Subcommand]:
    """Import the dataclass of a command, given as MODULE:CLASS."""
    module, _, name = place.partition(":")
    with signals_held():  # extension modules turn an interruption into an ImportError
        found: type[Subcommand] = getattr(import_module(module), name)
    return found


def _summary(command: type[Any]) -> str:
    """Return the first sentence of a command's help."""
    text = str(inspect.getdoc(command)).replace("\n", " ")
    return text.partition(". ")[0].rstrip(".")


def parse_command(
    options: type[OptionsT], prog: str, words: Sequence[str] | None = None, page: Page = _PLAIN
) -> OptionsT:
    """Return the dataclass of a command, filled from its command line; see `read_command_line`."""
    return options(**read_command_line(options, prog, words, page))


def read_command_line(
    options: type[Any], prog: str, words: Sequence[str] | None = None, page: Page = _PLAIN
) -> dict[str, Any]:
    """Return the options on the command line by field. --help prints the help and exits.

    Args:
        options: The dataclass. Words that belong to no option fill the fields that have no default
            and are in no group, in order.
        prog: Name of the command.
        words: The words after the command's name. Default: from the command line of this process.
            Words behind `--` are no options.
        page: The groups and the help.

    Raises:
        ConfigError: An option is unknown, a word is missing or unexpected, or an option does not
            take its value.
    """
    words = list(sys.argv[1:] if words is None else words)
    end = words.index("--") if "--" in words else len(words)
    words, behind = words[:end], words[end + 1 :]
    kinds, fields = get_type_hints(options, include_extras=True), dataclasses.fields(options)
    groups = page.groups or {"": [each.name for each in fields if each.default is not MISSING]}
    flags = {name: flag_of(name) for names in groups.values() for name in names}
    positional = {
        field.name: kinds[field.name]
        for field in fields
        if field.default is MISSING and field.name not in flags
    }
    parser = _Parser(prog, positional, flags, page)
    if {"-h", "--help", "--help-all"} & {*words}:
        is_short = page.common and "--help-all" not in words
        parser.describe(options, positional, is_short=bool(is_short))
        groups = {"": page.common} if is_short else groups
    for title, names in groups.items():
        parser.add_options(title, {name: kinds[name] for name in names})
    found, others = parser.parse_known_args([_with_hyphens(word) for word in words])
    _check_others(
        others, words, flags.values(), prog, page.other_names, takes_words=bool(positional)
    )
    given = _positional([*others, *behind], positional, prog)
    for name, value in vars(found).items():
        given[name] = _value(kinds[name], value, f"`{flags[name]}`")
    return given


class _Parser(argparse.ArgumentParser):
    """A parser of options that take any text, so its only errors are missing and extra values."""

    def __init__(
        self, prog: str, positional: Mapping[str, Any], flags: Mapping[str, str], page: Page
    ) -> None:
        placeholders = " ".join(map(_placeholder, positional.values()))
        super().__init__(
            prog=prog,
            usage=f"{prog} [-h] [OPTIONS] {placeholders}".strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        self._flags, self._page = flags, page
        self._helps: dict[str, str] = {}
        self._placeholders: dict[str, str] = {}
        """What stands for the value of each option in the help."""

    def describe(
        self, options: type[Any], positional: Mapping[str, Any], *, is_short: bool
    ) -> None:
        """Add the help. Without it, words may stand anywhere between the options."""
        page, width = self._page, shutil.get_terminal_size().columns - 2
        paragraphs = (page.about or str(inspect.getdoc(options))).split("\n\n")
        self.description = "\n\n".join(textwrap.fill(text, width) for text in paragraphs)
        self._helps = _helps(options, page.more)
        for name, kind in positional.items():
            self.add_argument(name, metavar=_placeholder(kind), help=self._helps[name])
        if page.common:
            self.add_argument("--help-all", action="help", help="show all options and exit")
        if is_short:
            more = f"`{self.prog} --help-all` shows all {len(self._flags)} options."
            self.epilog = f"{page.examples}\n{more}"

    def add_options(self, title: str, kinds: Mapping[str, Any]) -> None:
        """Add the options of a group, by field."""
        group = self.add_argument_group(f"{title} options") if title else self
        for name, kind in kinds.items():
            flag, is_reversible = self._flags[name], name in self._page.reversible
            how = _reading(kind, is_reversible=is_reversible)
            group.add_argument(flag, dest=name, help=self._helps.get(name), **how)
            if is_reversible and kind is not bool:  # a switch that may have a word
                no, hidden = f"--no-{flag[2:]}", argparse.SUPPRESS
                group.add_argument(no, dest=name, help=hidden, action="store_const", const=False)
            self._placeholders[flag] = how.get("metavar", "")

    def print_help(self, file: object = None) -> None:
        """Print the help. argparse would drop the errors of stdout."""
        print(self.format_help(), end="", flush=True)

    def error(self, message: str) -> NoReturn:
        """Raise the error as a ConfigError."""
        flag = re.split("[/:]", message.removeprefix("argument "))[0]
        expected = f"expected a value: {self._placeholders.get(flag)}"
        problem = "takes no value" if "ignored explicit" in message else expected
        raise ConfigError(f"`{flag}`: {problem}. See {self.prog} --help.")


def _with_hyphens(word: str) -> str:
    """Return a word with the usual spelling of an option: `--shard_size=1MB`."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def _check_others(
    others: Sequence[str],
    words: Sequence[str],
    flags: Collection[str],
    prog: str,
    other_names: Mapping[str, str],
    *,
    takes_words: bool,
) -> None:
    """Reject unknown options, and words if the command takes none."""
    for word in others:
        flag = word.split("=")[0]
        if word.startswith("-") and word != "-":
            other = other_names.get(flag.replace("_", "-"))
            meant = f" Did you mean {other}?" if other else nearest(flag, flags)
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
        known = f", expected {placeholders}" if names else ""
        raise ConfigError(f"`{words[len(names)]}`: unexpected word{known}. See {prog} --help.")
    given = zip(kinds.items(), words, strict=True)
    return {name: setting_of(kind, word, _placeholder(kind)) for (name, kind), word in given}


def _reading(kind: Any, *, is_reversible: bool) -> dict[str, Any]:
    """Return how the parser reads an option: as a switch, one word, or several words."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if is_reversible else "store_true"}
    how: dict[str, Any] = {"metavar": _placeholder(kind).split()[0]}
    if get_origin(kind) is tuple:  # each time that the option is given adds a value
        how["action"] = "append"
        if _takes_several(kind):
            how["nargs"] = "*"
    elif bool in kinds_of(kind):  # a switch that may have a word
        how |= {"nargs": "?", "const": None}
    elif Shards in kinds_of(kind):
        how["nargs"] = "*"
    return how


def _value(kind: Any, words: Any, flag: str) -> Any:
    """Return the value that the words of an option mean."""
    if kind is bool or words is None:
        return words is not False
    if _takes_several(kind):
        words = [word for together in words for word in together or [""]]
    value = setting_of(kind, words, flag)
    if value == "":
        raise empty(kind, flag)
    return value


def _takes_several(kind: Any) -> bool:
    """Return whether several words may follow an option each time that it is given."""
    return get_origin(kind) is tuple and _placeholder(kind).endswith("...")


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
    return "|".join(_placeholder(each) for each in kinds_of(kind) if each is not bool)


def _helps(options: type[Any], more: Mapping[str, str]) -> dict[str, str]:
    """Return the help of each field: the docstring below it, and its default, unless the docstring
    has one."""
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
        has_default = not (field.default in (None, (), MISSING) or field.default is False)
        if has_default and "Default: " not in found[field.name]:
            found[field.name] += f" Default: {field.default}."
    return {name: help_.replace("%", "%%") for name, help_ in found.items()}
