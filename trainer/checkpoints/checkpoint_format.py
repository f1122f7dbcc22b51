"""One checkpoint on disk: state.safetensors and checkpoint.json.

checkpoint.json lists each tensor with its dtype and shape. Every byte is verified: checkpoint.json
has the checksum of the tensor file and a checksum of itself.

A state is saved in two parts: its tensors by name, and the rest as JSON with the tensors' names in
their places.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.storage import file_xxh3, sync_folder
from tokenfeed.trainer.checkpoints.metadata import CheckpointMeta
from tokenfeed.trainer.checkpoints.tensor_file import HostCopy, read_tensors, write_tensors
from tokenfeed.trainer.distributed.world import State, World

__all__ = [
    "CONTENT_FILE",
    "broadcast_state",
    "files_of",
    "join",
    "read_checkpoint",
    "read_meta",
    "split",
    "verify_checkpoint",
    "write_checkpoint",
]

Meta = TypeVar("Meta")

_TENSOR = "$tensor"


def split(state: State) -> tuple[State, dict[str, Tensor]]:
    """Split a state: return it with names in place of tensors, and the tensors by name.

    A tensor's name is its path in the state. Tied weights are one tensor with one name.

    Example: {"model": {"a": T}, "step": 3} becomes {"model": {"a": {"$tensor": "model.a"}}, "step":
        3}
    and {"model.a": T}.

    Raises:
        ConfigError: The state has a value that is neither a tensor nor valid in JSON.
    """
    names: dict[Any, str] = {}
    tensors: dict[str, Tensor] = {}

    def name_of(tensor: Tensor, path: str) -> str:
        identity = _identity(tensor)
        if identity not in names:
            while path in tensors:  # keys ("a.b", "c") and ("a", "b.c") have the same path
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
    """Return the state that `split` took apart. Its tuples have become lists."""
    if isinstance(rest, dict):
        if _TENSOR in rest:
            return tensors[rest[_TENSOR]]
        return {key: join(value, tensors) for key, value in rest.items()}
    if isinstance(rest, list):
        return [join(value, tensors) for value in rest]
    return rest


def broadcast_state(world: World, load: Callable[[], tuple[Meta, State]]) -> tuple[Meta, State]:
    """Call `load` on rank 0, and return its result on all ranks.

    Only rank 0 needs the checkpoint's files.
    """
    if world.size == 1:
        return load()
    tensors: dict[str, Tensor] = {}

    def load_rest() -> tuple[Meta, State, dict[str, tuple[torch.dtype, torch.Size]]]:
        meta, state = load()
        rest, found = split(state)
        tensors.update(found)
        return meta, rest, {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()}

    meta, rest, kinds = world.from_rank_0(load_rest)
    for name, (dtype, shape) in kinds.items():
        if name not in tensors:  # not rank 0: allocate memory to receive the tensor
            tensors[name] = torch.empty(shape, dtype=dtype, device=world.device)
    world.broadcast([tensors[name] for name in kinds])
    return meta, join(rest, tensors)


def _identity(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors that share memory, shape and strides."""
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
        f"{path}: {what} cannot be saved. Let the model's state have only tensors, numbers, texts, "
        "lists, and dicts with texts as keys."
    )


_VERSION = 1
CONTENT_FILE, _TENSORS = "checkpoint.json", "state.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class _TensorEntry:
    """A tensor in checkpoint.json."""

    dtype: str
    shape: tuple[int, ...]

    def kind(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and shape as torch has them."""
        dtype = getattr(torch, self.dtype)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{self.dtype} is not a dtype")
        return dtype, self.shape


@dataclass(frozen=True, kw_only=True, slots=True)
class _Content:
    """The fields of checkpoint.json, without its own checksum."""

    version: int
    meta: CheckpointMeta
    files: dict[str, str]
    """The checksum of each file, by name."""
    tensors: dict[str, _TensorEntry]
    state: dict[str, Any]
    """The state without tensors, with names where tensors belong."""


def write_checkpoint(folder: Path, meta: CheckpointMeta, rest: State, copy: HostCopy) -> None:
    """Wait for the copy of the tensors. Then write a checkpoint and sync it."""
    copy.wait()
    folder.mkdir(parents=True)
    content = _Content(
        version=_VERSION,
        meta=meta,
        files={_TENSORS: write_tensors(folder / _TENSORS, copy.places, copy.memory)},
        tensors={
            name: _TensorEntry(dtype=str(place.dtype).removeprefix("torch."), shape=place.shape)
            for name, place in copy.places.items()
        },
        state=rest,
    )
    with open(folder / CONTENT_FILE, "wb") as file:
        file.write(_sealed(asdict(content)))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read_checkpoint(folder: Path, device: torch.device) -> tuple[CheckpointMeta, State]:
    """Read a checkpoint. Place its tensors on `device`.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: The checkpoint is damaged.
    """
    content = verify_checkpoint(folder)
    kinds = {name: entry.kind() for name, entry in content.tensors.items()}
    try:
        tensors = read_tensors(folder / _TENSORS, kinds, device)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return content.meta, join(content.state, tensors)


def verify_checkpoint(folder: Path) -> _Content:
    """Read and verify all bytes of a checkpoint; return its checkpoint.json.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: The checkpoint is damaged.
    """
    content = _content((folder / CONTENT_FILE).read_bytes())
    for name, checksum in content.files.items():
        if file_xxh3(folder / name) != checksum:
            raise ValueError(f"{name} fails its checksum")
    return content


def read_meta(folder: Path) -> CheckpointMeta:
    """Return what checkpoint.json records about the run. Does not read tensors.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: The file is damaged.
    """
    return _content((folder / CONTENT_FILE).read_bytes()).meta


def files_of(data: bytes) -> list[str]:
    """Return the other files of a checkpoint, from the content of its checkpoint.json.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: The content is damaged.
    """
    return list(_content(data).files)


def _content(data: bytes) -> _Content:
    content = msgspec.convert(_unsealed(data), _Content)
    if content.version != _VERSION:
        raise ValueError(f"its version is {content.version}, expected {_VERSION}")
    return content


def _sealed(content: dict[str, Any]) -> bytes:
    """Encode as JSON, with a checksum over the rest of the content."""
    return _as_json({"xxh3": xxhash.xxh3_64_hexdigest(_as_json(content))} | content)


def _unsealed(data: bytes) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(data)
    checksum = content.pop("xxh3")
    if xxhash.xxh3_64_hexdigest(_as_json(content)) != checksum:
        raise ValueError(f"{CONTENT_FILE} fails its checksum")
    return content


def _as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"  # with an indent, json would hold the GIL
