"""One checkpoint on disk: checkpoint.json, and a safetensors file for each rank that saved.

A state is saved in two parts: its tensors by name, and the rest as JSON with the tensors' names in
their places. checkpoint.json lists each tensor with its dtype and shape. Every byte is verified:
checkpoint.json has the checksum of each tensor file and a checksum of itself.

`torch.distributed.checkpoint` reads the tensors: slice by slice into memory that exists already,
whatever number of ranks has written them.
"""

import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.storage import file_xxh3, sync_folder
from tokenfeed.trainer.checkpoints.tensor_file import is_sharded_tensor, stored_form
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.distributed.world import State, World

_TENSOR = "$tensor"
_VERSION = 2
CONTENT_FILE = "checkpoint.json"
_READERS = 4
_FILE_NAME = re.compile(r"state-\d+\.safetensors")
_WORDS = {
    "model": "--model",
    "task": "task",
    "vocabulary_size": "vocabulary size",
    "optimizer": "--optimizer",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The step with the best weights on the validation split."""

    step: int
    metric: str
    """The metric that decided."""
    metrics: dict[str, float]
    """All metrics at that step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMeta:
    """The progress of a run, and the settings that a resumed run must not change."""

    step: int
    """Steps trained."""
    tokens: int
    """Real tokens trained."""
    slots: int
    """Token slots trained, padding included."""
    model: str
    vocabulary_size: int
    task: str
    optimizer: str
    loader: dict[str, Any]
    """`ShardLoader.state_dict()` after the last batch of `step`."""
    best: Best | None = None
    """The best step so far, this one included."""
    config: dict[str, Any] = field(default_factory=dict)
    """The run's settings, for people and for `check`."""

    def check(self, config: TrainConfig, ours: "CheckpointMeta") -> None:
        """Reject a resumed run with another model, or with fewer steps than were trained.

        Raises:
            ConfigError: --steps is below the trained steps.
            ResumeError: `ours`, a new run with `config`, would train another model, task or
                optimizer.
        """
        if self.step > config.steps:
            raise ConfigError(
                f"`--steps`={config.steps}: {config.run_dir} has trained {self.step} steps "
                "already. Raise it to go on."
            )
        for name, words in _WORDS.items():
            saved, wanted = getattr(self, name), getattr(ours, name)
            if saved != wanted:
                raise ResumeError(
                    f"cannot resume: the checkpoint has {words} {saved}, this run has "
                    f"{wanted}. Use the same, or start a new run in another --run-dir."
                )


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

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            identity = _identity(value)
            if identity not in names:
                while path in tensors:  # keys ("a.b", "c") and ("a", "b.c") have the same path
                    path += "_"
                names[identity], tensors[path] = path, value
            return {_TENSOR: names[identity]}
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str) or key == _TENSOR:
                    raise _refused(f"the key {key!r}", path)
            return {key: walk(inner, f"{path}.{key}") for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(inner, f"{path}.{index}") for index, inner in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise _refused(f"a {type(value).__name__}", path)

    return {key: walk(value, key) for key, value in state.items()}, tensors


def _identity(tensor: Any) -> Any:
    """Return a key that is equal for tensors that share memory, shape and strides."""
    own = tensor.to_local() if is_sharded_tensor(tensor) else tensor
    if own.numel() == 0:
        return id(tensor)
    return own.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _refused(what: str, path: str) -> ConfigError:
    return ConfigError(
        f"{path}: {what} cannot be saved. Let the model's state have only tensors, numbers, texts, "
        "lists, and dicts with texts as keys."
    )


@dataclass(frozen=True, slots=True)
class Kind:
    """Dtype and shape of a whole tensor in checkpoint.json."""

    dtype: str
    shape: tuple[int, ...]

    def empty(self, like: Tensor | None = None) -> Tensor:
        """Return a new tensor: on the host, or on the device of `like`.

        If `like` has the same shape, the new tensor has its layout and its shards too.
        """
        dtype = getattr(torch, self.dtype)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{self.dtype} is not a dtype")
        if like is not None and like.shape == self.shape:
            return torch.empty_like(like, dtype=dtype)
        return torch.empty(
            self.shape, dtype=dtype, device=like.device if like is not None else None
        )


def kinds_of(tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    """Return the dtype and shape of each tensor."""
    return {
        name: Kind(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Content:
    """The fields of checkpoint.json, without its own checksum."""

    version: int
    meta: CheckpointMeta
    files: dict[str, str]
    """The checksum of each file, by name."""
    tensors: dict[str, Kind]
    state: dict[str, Any]
    """The state without tensors, with names where tensors belong."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint. Its tensors are still on disk."""

    folder: Path
    content: _Content

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read and verify all bytes of a checkpoint. Keep its checkpoint.json.

        Raises:
            OSError, ValueError, KeyError, TypeError, AttributeError: The checkpoint is damaged.
        """
        content = _content((folder / CONTENT_FILE).read_bytes())
        if wrong := [name for name in content.files if not _FILE_NAME.fullmatch(name)]:
            raise ValueError(f"{CONTENT_FILE} lists {wrong[0]!r}, expected state-0.safetensors")
        others = {path.name for path in folder.glob("*.safetensors")} - content.files.keys()
        if others:  # the reader would take tensors from these files too
            raise ValueError(f"{min(others)} is not listed in {CONTENT_FILE}")
        with ThreadPoolExecutor(_READERS) as pool:
            found = pool.map(file_xxh3, [folder / name for name in content.files])
        for (name, checksum), actual in zip(content.files.items(), found, strict=True):
            if actual != checksum:
                raise ValueError(f"{name} fails its checksum: {actual}, expected {checksum}")
        num_bytes = sum((folder / name).stat().st_size for name in content.files)
        for name, kind in content.tensors.items():
            if min(kind.shape, default=0) < 0 or math.prod(kind.shape) > num_bytes:
                raise ValueError(
                    f"{CONTENT_FILE} has the shape {kind.shape} of {name}, but all files together "
                    f"have {num_bytes:,} bytes"
                )
        return cls(folder, content)

    @staticmethod
    def meta_in(folder: Path) -> CheckpointMeta:
        """Return what checkpoint.json records about the run. Does not read tensors.

        Raises:
            OSError, ValueError, KeyError, TypeError, AttributeError: The file is damaged.
        """
        return _content((folder / CONTENT_FILE).read_bytes()).meta

    @property
    def meta(self) -> CheckpointMeta:
        """What checkpoint.json records about the run."""
        return self.content.meta

    def kind(self, value: Any) -> Kind | None:
        """Return the dtype and shape of a tensor in `content.state`; None for another value."""
        is_tensor = isinstance(value, dict) and _TENSOR in value
        return self.content.tensors[value[_TENSOR]] if is_tensor else None

    def read(
        self, live: State | None = None, world: World | None = None, *, only: str | None = None
    ) -> State:
        """Return the state that was saved. Its tuples have become lists.

        If tensors of `live` are sharded over ranks, each rank reads its shards. Else rank 0 reads
        the files, and the other ranks receive the tensors from rank 0.

        Args:
            live: A state of the same structure. Its tensors are overwritten and returned. Tensors
                that it lacks are new, on the host.
            world: All ranks that call this. Default: this process alone.
            only: The one part of the state to read, such as "model".

        Raises:
            OSError, ValueError, KeyError, TypeError: The checkpoint is damaged.
        """
        _, lives = split(live or {})
        tensors: dict[str, Tensor] = {}

        def bind(value: Any) -> Any:
            """Return a part of the state with tensors to read into, and add these to `tensors`."""
            if (kind := self.kind(value)) is not None:
                name = value[_TENSOR]
                if name not in tensors:  # else a tied weight
                    tensors[name] = lives[name] if name in lives else kind.empty()
                return tensors[name]
            if isinstance(value, dict):
                return {key: bind(each) for key, each in value.items()}
            return [*map(bind, value)] if isinstance(value, list) else value

        parts = {key: part for key, part in self.content.state.items() if only in (None, key)}
        state: State = bind(parts)
        world = world or World(torch.device("cpu"))
        is_sharded = any(map(is_sharded_tensor, tensors.values()))
        reads = is_sharded or world.is_main
        world.run_slow(lambda: self._read_into(tensors) if reads else None)
        if not is_sharded:
            world.broadcast([*tensors.values()])
        return state

    @torch.no_grad()
    def _read_into(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        # It takes a second to import, which only a run that resumes should spend.
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with warnings.catch_warnings():  # torch warns that ranks read without messages
            warnings.simplefilter("ignore")
            try:
                load(
                    {name: stored_form(tensor) for name, tensor in tensors.items()},
                    storage_reader=HuggingFaceStorageReader(str(self.folder)),
                    no_dist=True,
                )
            except CheckpointException as error:  # no Exception
                raise ValueError(" ".join(str(error).split())) from error


def write_content(
    folder: Path,
    meta: CheckpointMeta,
    rest: State,
    tensors: Mapping[str, Kind],
    files: dict[str, str],
) -> None:
    """Write checkpoint.json, the last file of a checkpoint, and sync the folder."""
    content = _Content(version=_VERSION, meta=meta, files=files, tensors=dict(tensors), state=rest)
    with open(folder / CONTENT_FILE, "wb") as file:
        file.write(_sealed(asdict(content)))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


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
    if (actual := xxhash.xxh3_64_hexdigest(_as_json(content))) != checksum:
        raise ValueError(f"{CONTENT_FILE} fails its checksum: {actual}, expected {checksum}")
    return content


def _as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"  # with an indent, json would hold the GIL
