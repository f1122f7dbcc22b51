"""Settings as people write them, in YAML and on command lines: typed, or refused in one line."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml

from tokenfeed.pipeline.errors import ConfigError

__all__ = ["expected", "nearest", "read_settings", "typed"]

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}


def typed(kind: Any, value: Any, said: str) -> Any:
    """A value that was written as text or YAML, as its field has it.

    Args:
        kind: The field's type.
        value: As it was read.
        said: Where it was said, for the error.

    Raises:
        ConfigError: It is of another type, or out of its bounds.
    """
    if value == "" and _core(kind)[0] is Path:  # it would be the working directory
        raise ConfigError(f"{said} is empty: expected a folder. Is a shell variable unset?")
    try:
        # Not strict: words are text, and YAML takes 1e-3, without a point, for text.
        return msgspec.convert(value, kind, strict=False, dec_hook=_as_path)
    except (msgspec.ValidationError, TypeError):
        raise ConfigError(f"{said}: expected {expected(kind)}, got {value}.") from None


def expected(kind: Any) -> str:
    """What a field of this type takes, in words."""
    core, bounds = _core(kind)
    if get_origin(core) is Literal:
        return f"one of {', '.join(get_args(core))}"
    return _KINDS.get(core, "text") + (_within(bounds) if bounds else "")


def nearest(name: str, names: Iterable[str]) -> str:
    """The question whether one of the names was meant; empty where none is like it."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {found[0]}?" if found else ""


def read_settings(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a YAML file, by the names of their fields; hyphens in names are welcome.

    Raises:
        ConfigError: No such file, no YAML, a name that is none of `kinds`, or a wrong type.
    """
    found: dict[str, Any] = {}
    for written, value in _read_yaml(path).items():
        name = str(written).replace("-", "_")
        if name not in kinds:
            raise ConfigError(f"{path}: {written} is no setting.{nearest(name, kinds)}")
        if name in found:
            raise ConfigError(f"{path}: {name} is there twice. Leave one out.")
        found[name] = typed(kinds[name], value, f"{path}: {written}")
    return found


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"`--config`: {path}: {error.strerror}. Give a YAML file.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: is no YAML ({' '.join(str(error).split())}).") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected settings, one a line, like `steps: 200`.")
    return content


def _core(kind: Any) -> tuple[Any, msgspec.Meta | None]:
    """The type but for None, and its bounds."""
    kinds = [k for k in get_args(kind) if k is not NoneType]
    if NoneType in get_args(kind) and len(kinds) == 1:
        return _core(kinds[0])
    if hasattr(kind, "__metadata__"):
        return kinds[0], next((m for m in kinds[1:] if isinstance(m, msgspec.Meta)), None)
    return kind, None


def _within(bounds: msgspec.Meta) -> str:
    if bounds.gt is not None:
        return f" above {bounds.gt}"
    return f" of at least {bounds.ge}" + ("" if bounds.lt is None else f" and below {bounds.lt}")


def _as_path(kind: type, value: Any) -> Path:
    return Path(value)
