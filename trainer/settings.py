"""Settings as people write them, in YAML and on command lines: typed, or refused in one line."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.sizes import bytes_meant

__all__ = [
    "Bytes",
    "alternatives",
    "expected",
    "flag_of",
    "is_size",
    "nearest",
    "parts_of",
    "read_settings",
    "takes_weights",
    "typed",
]

Bytes = Annotated[int, msgspec.Meta(ge=0, extra={"unit": "bytes"})]
"""A size: a number of bytes, which people may write as 50GB."""
_SHORT_NUMBER = re.compile(r"[+-]?(\.[0-9]+|[0-9]+\.)(e[+-]?[0-9]+)?", re.IGNORECASE)
"""A number without digits before or after its point, which msgspec takes for text."""
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}


def flag_of(name: str) -> str:
    """How a setting is called on the command line."""
    return "--" + name.replace("_", "-")


def typed(kind: Any, value: Any, said: str) -> Any:
    """A value that was written as text or YAML, as its field has it.

    Args:
        kind: The field's type.
        value: As it was read.
        said: Where it was said, for the error.

    Raises:
        ConfigError: It is of another type, or out of its bounds.
    """
    if isinstance(value, list) and (parts := parts_of(kind)):
        return tuple(_part(parts, entry, f"{said} {n}") for n, entry in enumerate(value, 1))
    if isinstance(value, list) and takes_weights(kind):
        value = _weighed([str(word) for word in value], said)
    if isinstance(value, str) and any(is_size(bounds) for _, bounds in alternatives(kind)):
        value = value if (size := bytes_meant(value)) is None else size
    if isinstance(value, str) and _SHORT_NUMBER.fullmatch(value):
        kinds = [each for each, _ in alternatives(kind)]
        value = float(value) if float in kinds and str not in kinds else value
    is_folder = alternatives(kind)[0][0] is Path  # empty, it would be the working directory
    if value in ("", {}) and (is_folder or takes_weights(kind)):
        raise ConfigError(f"{said} is empty: expected a folder. Is a shell variable unset?")
    try:
        # Not strict: words are text, and YAML takes 1e-3, without a point, for text.
        return msgspec.convert(value, kind, strict=False, dec_hook=_as_path)
    except (msgspec.ValidationError, TypeError):
        hint = " Put it in quotes." if expected(kind) == "text" else ""  # like 20:23 and 1e3
        raise ConfigError(f"{said}: expected {expected(kind)}, got {value}.{hint}") from None


def alternatives(kind: Any) -> list[tuple[Any, msgspec.Meta | None]]:
    """The types that a field takes besides None, each with its bounds."""
    if get_origin(kind) in (Union, UnionType):
        return [found for each in get_args(kind) for found in alternatives(each)]
    if get_origin(kind) is Annotated:
        core, *notes = get_args(kind)
        bounds = next((note for note in notes if isinstance(note, msgspec.Meta)), None)
        return [(each, bounds) for each, _ in alternatives(core)]
    return [] if kind is NoneType else [(kind, None)]


def is_size(bounds: msgspec.Meta | None) -> bool:
    """Whether these are the bounds of `Bytes`."""
    return bounds is not None and bounds.extra is not None and "unit" in bounds.extra


def takes_weights(kind: Any) -> bool:
    """Whether a field takes folders with weights, written as words with = between."""
    return any(get_origin(each) is dict for each, _ in alternatives(kind))


def parts_of(kind: Any) -> Any | None:
    """The dataclass of whose instances a field takes several, which only a file can say."""
    inner = get_args(kind)[0] if get_origin(kind) is tuple else None
    return inner if dataclasses.is_dataclass(inner) else None


def expected(kind: Any) -> str:
    """What a field of this type takes, in words."""
    return " or ".join(_words(each, bounds) for each, bounds in alternatives(kind))


def nearest(name: str, names: Iterable[str]) -> str:
    """The question whether one of the names was meant; empty where none is like it."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {found[0]}?" if found else ""


def read_settings(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a YAML file, by the names of their fields; hyphens in names are welcome.

    Raises:
        ConfigError: No such file, no YAML, a name that is none of `kinds`, or a wrong type.
    """
    return _settings(_read_yaml(path), kinds, f"{path}:")


def _settings(content: Mapping[Any, Any], kinds: Mapping[str, Any], said: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for written, value in content.items():
        name = str(written).replace("-", "_")
        if name not in kinds:
            raise ConfigError(f"{said} unknown setting {written}.{nearest(name, kinds)}")
        if name in found:
            raise ConfigError(f"{said} {name} is there twice. Leave one out.")
        found[name] = typed(kinds[name], value, f"{said} {written}")
    return found


def _part(kind: Any, content: Any, said: str) -> Any:
    """One of several parts, from a mapping of its settings."""
    if not isinstance(content, dict):
        raise ConfigError(f"{said}: expected settings like `steps: 200`, got {content}.")
    values = _settings(content, get_type_hints(kind, include_extras=True), f"{said}:")
    for field in dataclasses.fields(kind):
        if field.name not in values and field.default is dataclasses.MISSING:
            raise ConfigError(f"{said}: has no {field.name}. Add them.")
    return kind(**values)


class _Repetition(Exception):
    """A name that a mapping has twice."""


class _Loader(yaml.SafeLoader):
    """Refuses what YAML forbids and its readers let pass: of two values the last would count."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise _Repetition(f"line {line} says {name} again, after line {lines[name]}")
            lines[name] = line
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except _Repetition as error:
        raise ConfigError(f"{path}: {error}. Leave one out.") from None
    except OSError as error:
        raise ConfigError(f"`--config`: {path}: {error.strerror}. Give a YAML file.") from error
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply to be settings.") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: is no YAML ({' '.join(str(error).split())}).") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected settings, one a line, like `steps: 200`.")
    return content


def _weighed(words: list[str], said: str) -> str | dict[str, str]:
    """Weights by folder. One word alone is a folder, whatever is in its name."""
    if len(words) == 1:
        return words[0]
    found: dict[str, str] = {}
    for word in words:
        folder, _, weight = word.rpartition("=")
        if not folder or Path(word).exists():
            raise ConfigError(f"{said}: {word} has no weight. Of several each has, like {word}=1.")
        if folder in found:
            raise ConfigError(f"{said}: {folder} is there twice. Raise its weight instead.")
        found[folder] = weight
    return found


def _words(kind: Any, bounds: msgspec.Meta | None) -> str:
    if parts_of(kind):
        return "a list of settings"
    if get_origin(kind) is dict:
        return "folders with weights above 0, like a=0.7 b=0.3"
    if get_origin(kind) is tuple:
        return f"a list: {expected(get_args(kind)[0])}"
    if get_origin(kind) is Literal:
        names = get_args(kind)
        return ("one of " if len(names) > 1 else "") + ", ".join(names)
    if is_size(bounds):
        return "a size like 50GB, or 0"
    return _KINDS.get(kind, "text") + (_within(bounds) if bounds else "")


def _within(bounds: msgspec.Meta) -> str:
    if bounds.gt is not None:
        return f" above {bounds.gt}"
    return f" of at least {bounds.ge}" + ("" if bounds.lt is None else f" and below {bounds.lt}")


def _as_path(kind: type, value: Any) -> Path:
    return Path(value)
