"""Convert settings as people write them, on a command line or in YAML, or reject them in one line.
Read presets.

msgspec converts a value to the type of its field and checks the bounds in `Annotated`. The metadata
there also has the words of errors (`description`: what was expected) and of the help (`title`: the
placeholder for a value).
"""

import contextlib
import dataclasses
import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from tokenfeed.pipeline.checks import bytes_meant
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.text import is_address, public

Positive = Annotated[int, Meta(ge=1, title="N", description="a whole number of at least 1")]
NotNegative = Annotated[int, Meta(ge=0, title="N", description="a whole number of at least 0")]
AboveZero = Annotated[
    float, Meta(gt=0, le=sys.float_info.max, title="X", description="a number above 0")
]
Bytes = Annotated[int, Meta(ge=0, title="SIZE", description="a size like 50GB, or 0")]
Size = Annotated[int, Meta(ge=1, title="SIZE", description="a size like 256MB")]
"""Numbers of bytes, which people may write with a unit."""
Tokens = Annotated[int, Meta(ge=1, title="N", description="a number of tokens like 500M or 10B")]
"""A number of tokens, which people may write with K, M, B or T for powers of a thousand."""
Shards = Annotated[
    str | tuple[str, ...] | dict[str, AboveZero],
    Meta(
        title="FOLDER[=X] [FOLDER[=X] ...]",
        description="a folder, or several like a/ b/ (as one) or a=0.7 b=0.3",
    ),
]
"""The folder of a data set; several that are read as one; or several with their weights, which are
above 0."""

PRESETS_FOLDER = Path(__file__).parent.parent / "presets"
"""YAML files of settings. A GPU's file sets neither model, nor task, nor the length of rows, so
that it suits any data."""
OF_GPU = "auto"
"""The preset of the GPU of this machine."""
_GPUS = {"t4": "T4", "v100": "V100", "rtx4090": "RTX 4090", "a100": "A100", "h100": "H100"}
"""Presets for GPUs, with the words in the name of the GPU."""
_CONSUMER, _LARGEST_CONSUMER_BYTES = "rtx4090", 35e9

_LARGEST = 2**63
_THOUSANDS = {letter: 1000**power for power, letter in enumerate("KMBT", 1)}


def flag_of(name: str) -> str:
    """Return the option on the command line that sets a field."""
    return "--" + name.replace("_", "-")


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """Return the types that a field takes, without None."""
    is_union = get_origin(kind) in (Union, UnionType)
    return tuple(each for each in get_args(kind) if each is not NoneType) if is_union else (kind,)


def expected(kind: Any) -> str:
    """Describe in words what a field of this type takes."""
    return " or ".join(map(_words, kinds_of(kind)))


def _words(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return str(kind.__metadata__[0].description)
    if get_origin(kind) is tuple:
        part = get_args(kind)[0]
        if get_origin(part) is Literal:
            return f"one or several of {', '.join(get_args(part))}"
        return "a list of " + ("settings" if dataclasses.is_dataclass(part) else expected(part))
    if get_origin(kind) is Literal:
        names = get_args(kind)
        return ("one of " if len(names) > 1 else "") + ", ".join(names)
    return {bool: "true or false", Path: "a path"}.get(kind, "text")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return " Did you mean NAME?" with the most similar name; empty if no name is similar."""
    bare = {each.lstrip("-"): each for each in names}  # dashes would make options similar
    found = difflib.get_close_matches(name.lstrip("-"), bare, n=1)
    return f" Did you mean {bare[found[0]]}?" if found else ""


def setting_of(kind: Any, value: Any, where: str) -> Any:
    """Convert a value from the command line or YAML to the type of its field.

    Args:
        kind: The field's type.
        value: The value as read: text, a list of words, or what YAML has made of it.
        where: The option, or the file and the setting, for the error.

    Raises:
        ConfigError: The value has another type, or is out of bounds.
    """
    kinds = kinds_of(kind)
    part = get_args(kind)[0] if get_origin(kind) is tuple else None
    if isinstance(value, str) and get_origin(part) is Literal:
        value = [value]
    if isinstance(value, list) and dataclasses.is_dataclass(part):
        return tuple(_part(part, entry, f"{where} {n}") for n, entry in enumerate(value, 1))
    if Shards in kinds and isinstance(value, list):
        value = _weights(list(map(str, value)), where)
    if Shards in kinds and isinstance(value, dict):
        value = {
            folder: setting_of(AboveZero, weight, f"{where}: the weight of {public(folder)}")
            for folder, weight in value.items()
        }
    is_empty = value == "" or (value == {} and Shards in kinds)  # `skip: {}` skips no rows
    if is_empty and expected(kind) != "text":  # the path "" is the working directory
        raise empty(kind, where)
    if isinstance(value, str) and (Bytes in kinds or Size in kinds):
        size = bytes_meant(value)
        value = value if size is None else size
    number = re.fullmatch(r"(\d+\.?\d*)([KMBT])", str(value).strip().upper())
    if number and Tokens in kinds:  # like 1.5B
        value = round(float(number[1]) * _THOUSANDS[number[2]])
    words = ", ".join(map(str, value)) if part and isinstance(value, list) else value
    shown = public(words) if isinstance(words, str) else words
    try:
        found = _converted(kind, value)
    except (msgspec.ValidationError, TypeError):
        hint = " Put it in quotes." if expected(kind) == "text" else ""  # like 20:23 and 1e3
        raise ConfigError(f"{where}: expected {expected(kind)}, got {shown}.{hint}") from None
    if isinstance(found, Path) and is_address(str(value)):  # `Path` would remove a slash
        raise ConfigError(f"{where}: expected a path on this machine, got {shown}.")
    if isinstance(found, int) and found >= _LARGEST:
        raise ConfigError(f"{where}: expected below 2**63, got {shown}.")
    return found


def empty(kind: Any, where: str) -> ConfigError:
    """Return the error for an empty value."""
    return ConfigError(f"{where} is empty: expected {expected(kind)}. Is a shell variable unset?")


def _converted(kind: Any, value: Any) -> Any:
    try:
        # Not strict: words are text, and YAML reads 1e-3, which has no point, as text.
        return msgspec.convert(value, kind, strict=False, dec_hook=lambda _, given: Path(given))
    except msgspec.ValidationError:
        if isinstance(value, str):  # like .3 and 1.e-1, which are not numbers in JSON
            with contextlib.suppress(ValueError):
                return msgspec.convert(float(value), kind)
        raise


def _weights(words: list[str], where: str) -> str | tuple[str, ...] | dict[str, str]:
    """Parse weights by folder, or several folders without weights. A single word is a folder, even
    if its name has a =."""
    if len(words) < 2:
        return words[0] if words else ""
    if twice := [word for word in words if words.count(word) > 1]:
        raise ConfigError(f"{where}: {twice[0]} occurs twice. Name each folder once.")
    if all(map(_has_no_weight, words)):
        return tuple(words)
    found: dict[str, str] = {}
    for word in words:
        folder, _, weight = word.rpartition("=")
        if not folder or _has_no_weight(word):
            raise ConfigError(
                f"{where}: {word} has no weight, and others have one. Add one, like {word}=1, or "
                "leave out all weights: then every row is read once an epoch."
            )
        if folder in found:
            raise ConfigError(f"{where}: {folder} occurs twice. Raise its weight instead.")
        found[folder] = weight
    return found


def _has_no_weight(word: str) -> bool:
    """Return whether a word is a folder alone, which may have a = in its name or its query."""
    folder, equals, weight = word.rpartition("=")
    query = folder.partition("://")[2].partition("?")[2]
    is_key = "=" not in query.rpartition("&")[2] and query != "anonymous"
    return not equals or Path(word).exists() or bool(query and (is_key or not weight))


def _part(kind: Any, content: Any, where: str) -> Any:
    """Build a dataclass from a mapping of its settings."""
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected settings like `steps: 200`, got {content}.")
    values = checked_settings(content, get_type_hints(kind, include_extras=True), f"{where}:")
    for field in dataclasses.fields(kind):
        if field.name not in values and field.default is dataclasses.MISSING:
            raise ConfigError(f"{where}: has no {field.name}. Add it.")
    return kind(**values)


def check_types(config: Any) -> None:
    """Reject the first field of a dataclass whose value has another type or is out of bounds."""
    for name, kind in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        if not (isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0])):
            setting_of(kind, value, f"`{flag_of(name)}`")


_WITHDRAWN = {
    "until_step": " A stage ends by tokens: use until_tokens.",
    "to": " The weights of a stage stay: use several stages, each with its until_tokens.",
}
"""What to do instead of settings of a stage that existed before."""


def read_settings(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings in a YAML file, by field. Names may have hyphens or underscores.

    Raises:
        ConfigError: The file is missing or invalid YAML, or has an unknown name or a wrong value.
    """
    return checked_settings(_read_yaml(path), kinds, f"{path}:")


def checked_settings(
    content: Mapping[Any, Any], kinds: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return settings by field, converted to the types of their fields.

    Raises:
        ConfigError: A name is unknown, or a value is wrong. The message begins with `where`.
    """
    found: dict[str, Any] = {}
    for written, value in content.items():
        name = str(written).replace("-", "_")
        if name not in kinds:
            hint = _WITHDRAWN.get(name) or nearest(name, kinds)
            raise ConfigError(f"{where} unknown setting {written}.{hint}")
        if name in found:
            raise ConfigError(f"{where} {name} occurs twice. Leave one of the two out.")
        found[name] = setting_of(kinds[name], value, f"{where} {written}")
    return found


def preset_names() -> list[str]:
    """Return the names of all presets: GPUs, then purposes."""
    files = sorted(path.stem for path in PRESETS_FOLDER.glob("*.yaml"))
    return [OF_GPU, *_GPUS, *(name for name in files if name not in _GPUS)]


def read_preset(name: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a preset by field.

    Raises:
        ConfigError: There is no such preset.
    """
    names = preset_names()[1:]
    if name not in names:
        hint = nearest(name.lower(), names)
        raise ConfigError(
            f"`--preset`: expected {OF_GPU}, {', '.join(names)}, or several like t4,production, "
            f"got {name or 'an empty name'}.{hint}"
        )
    return read_settings(PRESETS_FOLDER / f"{name}.yaml", kinds)


def preset_of(gpu: str, capability: tuple[int, int], memory: float) -> str | None:
    """Return the preset that suits a GPU: by its name, or by its capability and memory in bytes;
    None for a GPU without tensor cores."""
    for name, words in _GPUS.items():
        if re.search(rf"\b{words}\b", gpu):
            return name
    if capability < (7, 0):
        return None
    if capability < (8, 0):
        return "v100" if capability < (7, 5) else "t4"
    if memory < _LARGEST_CONSUMER_BYTES:
        return _CONSUMER
    return "a100" if capability < (9, 0) else "h100"


class _Loader(yaml.SafeLoader):
    """Rejects a key that occurs twice: yaml would drop the first value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        names = [key.value for key in keys]
        for place, key in enumerate(keys):
            if key.value in names[:place]:
                problem = f"{key.value} occurs twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return node


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Give a YAML file.") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: invalid YAML ({' '.join(str(error).split())}).") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected settings, one a line, like `steps: 200`.")
    return content
