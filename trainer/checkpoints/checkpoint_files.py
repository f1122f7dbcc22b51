"""The checkpoints in a run's folder: list, read, add, and delete old ones.

A checkpoint is checkpoint.json, and a safetensors file for each rank that saved.

A state is a dict of tensors by name: "model.NAME", "optimizer.NAME.MOMENT" and so on. Every byte is
verified: checkpoint.json has the checksum of each tensor file and a checksum of itself.

`torch.distributed.checkpoint` reads the tensors: slice by slice into memory that exists already,
whatever number of ranks has written them. Its import takes a second, which only a run that resumes
should spend.
"""

import contextlib
import json
import logging
import math
import re
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import xxhash
import zstandard
from safetensors import SafetensorError
from torch import Tensor

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, atomic_folder, file_xxh3
from tokenfeed.trainer.config.run_config import CHECKPOINTS_FOLDER, TrainConfig, alpha_of
from tokenfeed.trainer.config.values import flag_of
from tokenfeed.trainer.distributed.world import State, World, is_sharded_tensor

_log = logging.getLogger(__name__)

_VERSION = 4
CONTENT_FILE = "checkpoint.json"
ZSTD_SUFFIX = ".zst"
_READERS = 4
_NAME = re.compile(r"step-(\d{8})")
_FILE_NAME = re.compile(r"state-\d+\.safetensors(\.zst)?")
_STORED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
DAMAGE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError),
    SafetensorError,
    zstandard.ZstdError,
)
"""Errors that reading a damaged checkpoint may raise."""
_KEPT = ("model", "optimizer", "lora", "lora_alpha")
"""Settings that a resumed run cannot change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The step with the best weights on the validation split."""

    step: int
    metric: str
    """The metric that decided."""
    metrics: dict[str, float]
    """All metrics at that step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """How a run performed until a checkpoint. Nothing that follows depends on it.

    Speed and stall are those of the measured steps since the start or the latest resume.
    """

    seconds: float
    """Wall time of the run so far, in all its sessions."""
    real_tokens_per_s: float | None
    """None during warm-up, as the stall."""
    stall: float | None
    """Fraction of the wall time, 0 to 1."""
    stall_causes: dict[str, float]
    """Share of the wall time by cause, without causes of 0."""
    peak_memory_bytes: int
    """Memory of the GPU that torch has used at most, on rank 0; on a CPU that of the process."""
    versions: dict[str, str]
    """Versions of the software that made the checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMeta:
    """The progress of a run, and its settings."""

    step: int
    """Steps trained."""
    tokens: int
    """Real tokens trained."""
    slots: int
    """Token slots trained, padding included."""
    loader: dict[str, Any]
    """`ShardLoader.state_dict()` after the last batch of `step`."""
    best: Best | None = None
    """The best step so far, this one included."""
    config: dict[str, Any] = field(default_factory=dict)
    """The settings of the run."""
    figures: Figures | None = None
    """None in checkpoints of earlier versions."""
    tokenizer: str = ""
    """Checksum of the tokenizer.json of the data."""

    def check(self, config: TrainConfig) -> None:
        """Reject a resumed run with another model, or with fewer steps than were trained.

        Raises:
            ConfigError: --steps is below the trained steps.
            ResumeError: `config` has another model or optimizer.
        """
        if self.step > config.steps:
            raise ConfigError(
                f"`--steps`={config.steps}: {config.run_dir} has trained {self.step} steps "
                "already. Raise it to go on."
            )
        for name in _KEPT:
            saved, wanted = (_in_effect(each, name) for each in (self.config, config.as_dict()))
            if saved != wanted:
                raise ResumeError(
                    f"cannot resume: the checkpoint has {flag_of(name)} {saved}, this run has "
                    f"{wanted}. "
                    "Use the same, or start a new run in another --run-dir."
                )


def _in_effect(config: Mapping[str, Any], name: str) -> Any:
    value = config.get(name)
    return alpha_of(config.get("lora"), value) if name == "lora_alpha" else value


Value = TypeVar("Value")


def part_of(state: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """Return the values whose names begin with a prefix, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def with_prefix(prefix: str, state: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values under names that begin with a prefix."""
    return {prefix + name: value for name, value in state.items()}


def unshared(state: Mapping[str, Tensor]) -> State:
    """Return each tensor once: tied weights under the first of their names.

    Raises:
        ConfigError: A value is not a tensor, or of a dtype that cannot be saved.
    """
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        if kind not in _STORED:
            raise ConfigError(
                f"{name}: {kind} cannot be saved. Let the model's state have only tensors of real "
                "numbers."
            )
        # Equal for tensors that share memory, shape and strides.
        own: Any = tensor.to_local() if is_sharded_tensor(tensor) else tensor  # type: ignore[attr-defined]
        key = own.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        first.setdefault(key if own.numel() else id(tensor), name)
    return {name: state[name] for name in first.values()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Content:
    """The fields of checkpoint.json, without its own checksum."""

    version: int
    meta: CheckpointMeta
    files: dict[str, str]
    """The checksum of each file, by name."""


class TensorInfo(NamedTuple):
    """Dtype and shape of a whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Checkpoint:
    """A verified checkpoint. Its tensors are still on disk."""

    folder: Path
    """A folder with the files of tensors. If they are compressed, this folder is temporary, and
    deleted with this object in the process that has opened the checkpoint."""
    meta: CheckpointMeta
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read and verify all bytes of a checkpoint.

        Raises:
            Errors of `DAMAGE`: The checkpoint is damaged.
        """
        content = _content((folder / CONTENT_FILE).read_bytes())
        others = {path.name for path in folder.glob("*.safetensors*")} - content.files.keys()
        if others:  # the reader would take tensors from these files too
            raise ValueError(f"{min(others)} is not listed in {CONTENT_FILE}")
        with ThreadPoolExecutor(_READERS) as pool:
            found = pool.map(file_xxh3, [folder / name for name in content.files])
        for (name, checksum), actual in zip(content.files.items(), found, strict=True):
            if actual != checksum:
                raise ValueError(f"{name} fails its checksum: {actual}, expected {checksum}")
        with contextlib.ExitStack() as made:
            if any(name.endswith(ZSTD_SUFFIX) for name in content.files):
                folder = made.enter_context(_unpacked(folder, [*content.files]))
            num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            tensors = _kinds_in(folder)
            for name, kind in tensors.items():
                if min(kind.shape, default=0) < 0 or math.prod(kind.shape) > num_bytes:
                    raise ValueError(
                        f"the files have the shape {kind.shape} of {name}, but all files together "
                        f"have {num_bytes:,} bytes"
                    )
            opened = cls(folder, content.meta, tensors)
            weakref.finalize(opened, made.pop_all().close)
        return opened

    def read(
        self, live: State | None = None, world: World | None = None, *, prefix: str = ""
    ) -> State:
        """Return the tensors whose names begin with `prefix`, by their whole names.

        If tensors of `live` are sharded over ranks, each rank reads its shards. Else rank 0 reads
        the files, and the other ranks receive the tensors from rank 0.

        Args:
            live: Tensors to overwrite and return, by name. Tensors that it lacks are new, on the
                host.
            world: All ranks that call this. Default: this process alone.
            prefix: The beginning of names.

        Raises:
            Errors of `DAMAGE`: The checkpoint is damaged.
        """
        lives = unshared(live or {})
        tensors = {
            name: lives[name] if name in lives else torch.empty(kind.shape, dtype=kind.dtype)
            for name, kind in self.tensors.items()
            if name.startswith(prefix)
        }
        world = world or World(torch.device("cpu"))
        is_sharded = any(map(is_sharded_tensor, tensors.values()))
        reads = is_sharded or world.is_main
        world.run_slow(lambda: self._read_into(tensors) if reads else None)
        if not is_sharded:
            world.broadcast([*tensors.values()])
        return tensors

    @torch.no_grad()
    def _read_into(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with warnings.catch_warnings(action="ignore"):  # torch warns of reads without messages
            try:
                load(
                    dict(tensors),
                    storage_reader=HuggingFaceStorageReader(str(self.folder)),
                    no_dist=True,
                )
            except CheckpointException as error:  # no Exception
                raise ValueError(" ".join(str(error).split())) from error


@contextlib.contextmanager
def _unpacked(folder: Path, names: list[str]) -> Iterator[Path]:
    """Yield a temporary folder with the files of tensors, not compressed.

    It is beside the checkpoint, where all ranks see it and a killed process is cleaned up after, or
    in the system's temporary folder if nothing can be written there.

    Raises:
        ResumeError: The disk is full.
        ZstdError, ValueError: A file is damaged.
    """
    own: dict[str, Any] = {"prefix": f"{folder.name}.", "suffix": TEMPORARY_SUFFIX}
    try:
        plain = Path(tempfile.mkdtemp(dir=folder.parent, **own))
    except OSError:
        plain = Path(tempfile.mkdtemp(**own))
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            jobs = [pool.submit(_unpack, folder / name, plain) for name in names]
            for job in jobs:
                job.result()
        yield plain
    finally:
        shutil.rmtree(plain, ignore_errors=True)


def _unpack(path: Path, plain: Path) -> None:
    """Decompress a file, whose checksum is right, into a folder."""
    try:
        with path.open("rb") as file, (plain / path.stem).open("wb") as made:
            zstandard.ZstdDecompressor().copy_stream(file, made)
    except OSError as error:
        raise ResumeError(
            f"{path}: cannot be decompressed into {plain} ({error.strerror}). Free space there; "
            "TMPDIR sets the folder for checkpoints on a read-only disk."
        ) from error


def _kinds_in(folder: Path) -> dict[str, TensorInfo]:
    """Return the dtype and shape of each tensor in the tensor files of a folder."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    found: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: TensorInfo(of.properties.dtype, tuple(of.size)) for name, of in found.items()}


def write_content(folder: Path, meta: CheckpointMeta, files: dict[str, str]) -> None:
    """Write checkpoint.json, the last file of a checkpoint, with a checksum over its content."""
    content = asdict(_Content(version=_VERSION, meta=meta, files=files))
    sealed = {"xxh3": xxhash.xxh3_64_hexdigest(_as_json(content))} | content
    (folder / CONTENT_FILE).write_bytes(_as_json(sealed))


def _content(data: bytes) -> _Content:
    found: dict[str, Any] = json.loads(data)
    checksum = found.pop("xxh3")
    if (actual := xxhash.xxh3_64_hexdigest(_as_json(found))) != checksum:
        raise ValueError(f"{CONTENT_FILE} fails its checksum: {actual}, expected {checksum}")
    content = msgspec.convert(found, _Content)
    if content.version != _VERSION:
        raise ValueError(f"its version is {content.version}, expected {_VERSION}")
    if wrong := [name for name in content.files if not _FILE_NAME.fullmatch(name)]:
        raise ValueError(f"{CONTENT_FILE} lists {wrong[0]!r}, expected state-0.safetensors")
    return content


def files_of(content: bytes) -> dict[str, str]:
    """Return the files of tensors that a checkpoint.json lists, with their checksums.

    Raises:
        Errors of `DAMAGE`: It is damaged.
    """
    return _content(content).files


def step_of(name: str) -> int:
    """Return the step of a checkpoint's folder; 0 for other names."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else 0


def _as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"  # with an indent, json would hold the GIL


class Checkpoints:
    """The checkpoints of one run. Several threads may use one object."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._pinned = 0

    @classmethod
    def of_run(cls, run_dir: Path) -> "Checkpoints":
        """Return the checkpoints in a run's folder."""
        return cls(run_dir / CHECKPOINTS_FOLDER)

    @staticmethod
    def name_of(step: int) -> str:
        """Return the name of the folder of a step's checkpoint."""
        return f"step-{step:08d}"

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, whether or not it exists."""
        return self._folder / self.name_of(step)

    def temporary(self, step: int) -> Path:
        """Return the folder of a step's checkpoint while it is made or deleted."""
        return self._folder / f"{self.name_of(step)}{TEMPORARY_SUFFIX}"

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        if not self._folder.is_dir():
            return []
        return sorted(filter(None, (step_of(path.name) for path in self._folder.iterdir())))

    def num_bytes(self) -> int:
        """Return the size of all checkpoints."""
        return sum(path.stat().st_size for path in self._folder.glob("step-*/*"))

    def latest(self) -> Path | None:
        """Return the checkpoint of the highest step; None if there is no checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def to_resume(self) -> Path:
        """Return the latest checkpoint.

        Raises:
            ResumeError: There are no checkpoints.
        """
        latest = self.latest()
        if latest is None:
            raise ResumeError(
                f"{self._folder}: no checkpoint to resume from. Give --run-dir the folder of an "
                "earlier run, or leave --resume out to start again."
            )
        return latest

    def way_on(self) -> str:
        """Return advice for an error message: how to continue after an error that ended the run."""
        latest = self.latest()
        return f"go on with --resume from {latest}" if latest else "start again: nothing was saved"

    def latest_meta(self) -> CheckpointMeta | None:
        """Return the progress of the latest checkpoint; None if there is no checkpoint.

        Raises:
            ResumeError: The checkpoint is damaged.
        """
        latest = self.latest()
        if latest is None:
            return None
        with reading(latest):
            return _content((latest / CONTENT_FILE).read_bytes()).meta

    def best(self) -> Best | None:
        """Return the best step according to the latest checkpoint.

        If nothing was evaluated yet, return None. If the checkpoint of that step is missing, log a
        warning and return None.

        Raises:
            ResumeError: The latest checkpoint is damaged.
        """
        with self._lock:  # else the latest may be deleted before it is read
            meta = self.latest_meta()
        best = meta.best if meta else None
        if best is None or self.path(best.step).is_dir():
            return best
        _log.warning(
            "%s: the best checkpoint so far is gone. Going on without it", self.path(best.step)
        )
        return None

    def open(self, step: int | None = None) -> Checkpoint:
        """Verify and return the checkpoint of a step, or the latest one.

        Raises:
            ResumeError: The checkpoint is missing or damaged.
        """
        path = self.to_resume() if step is None else self.path(step)
        with reading(path):
            checkpoint = Checkpoint.open(path)
            if self.path(checkpoint.meta.step) != path:
                raise ValueError(f"its checkpoint.json is of step {checkpoint.meta.step}")
            return checkpoint

    @contextlib.contextmanager
    def new(self, step: int) -> Iterator[Path]:
        """Yield an empty folder, `temporary(step)`. Afterwards the folder becomes the checkpoint.

        An existing checkpoint of this step is replaced. If the block raises, nothing changes.
        """
        with atomic_folder(self.path(step)) as temporary:
            yield temporary
            shutil.rmtree(self.path(step), ignore_errors=True)

    def delete_old(self, keep: int) -> None:
        """Delete all but the latest `keep` checkpoints and the best one.

        If the latest checkpoint is damaged, the best one is unknown. Then nothing is deleted.
        """
        try:
            best = self.best()
        except ResumeError:
            return
        with self._lock:
            kept = {self._pinned, best.step if best else 0}
            old = [step for step in self.steps()[:-keep] if step not in kept]
            unnamed = [self.path(step).rename(self.temporary(step)) for step in old]
        for path in unnamed:  # renamed first: a kill half-way leaves no damaged checkpoint
            shutil.rmtree(path)

    @contextlib.contextmanager
    def pinned(self, step: int) -> Iterator[Path | None]:
        """Yield the folder of a checkpoint, which `delete_old` keeps until the end of the block.

        Yield None if it is gone already. One thread at a time may pin one checkpoint.
        """
        with self._lock:
            self._pinned = step
        try:
            yield self.path(step) if self.path(step).is_dir() else None
        finally:
            self._pinned = 0

    def delete_unfinished(self) -> None:
        """Delete what a killed process left of checkpoints that it wrote or deleted."""
        for path in self._folder.glob(f"step-*{TEMPORARY_SUFFIX}"):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn errors of a damaged checkpoint into a ResumeError of one line."""
    try:
        yield
    except DAMAGE as error:
        raise ResumeError(
            f"{path}: the checkpoint is damaged ({error}). Delete this folder to resume from the "
            "one before it."
        ) from error
