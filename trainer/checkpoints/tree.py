"""A state apart: its tensors by name, and the rest as JSON that says where they belong."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tokenfeed.pipeline.errors import ConfigError

__all__ = ["State", "join", "split"]

State = dict[str, Any]
"""Nested dicts and lists of tensors and of what JSON holds."""

_TENSOR = "$tensor"


def split(state: State) -> tuple[State, dict[str, Tensor]]:
    """A state with names instead of tensors, and the tensors of these names.

    A name is the path to it: `model.blocks.0.weight`. Tied weights are one tensor with one name.

    Raises:
        ConfigError: It holds what neither is a tensor nor fits into JSON.
    """
    names: dict[Any, str] = {}
    tensors: dict[str, Tensor] = {}

    def name_of(tensor: Tensor, path: str) -> str:
        identity = _identity(tensor)
        if identity not in names:
            while path in tensors:  # of ("a.b", "c") and of ("a", "b.c")
                path += "_"
            names[identity], tensors[path] = path, tensor
        return names[identity]

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return {_TENSOR: name_of(value, path)}
        if isinstance(value, Mapping):
            return {_key(key, path): walk(inner, f"{path}.{key}") for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(inner, f"{path}.{index}") for index, inner in enumerate(value)]
        return _plain(value, path)

    return {key: walk(value, key) for key, value in state.items()}, tensors


def join(rest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `split` took apart; its tuples have become lists."""
    if isinstance(rest, dict):
        if _TENSOR in rest:
            return tensors[rest[_TENSOR]]
        return {key: join(value, tensors) for key, value in rest.items()}
    if isinstance(rest, list):
        return [join(value, tensors) for value in rest]
    return rest


def _identity(tensor: Tensor) -> Any:
    """Equal for tensors that are the same memory, seen in the same way."""
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str) or key == _TENSOR:
        raise _refused(f"the key {key!r}", path)
    return key


def _plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise _refused(f"a {type(value).__name__}", path)


def _refused(what: str, path: str) -> ConfigError:
    return ConfigError(
        f"{path}: {what} cannot be saved. Let the model's state be tensors, numbers, texts, lists "
        "and dicts with texts as keys."
    )
