"""Fixtures of all tests: small data sets, a small tokenizer, a small corpus."""

import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

# Before their import: an assertion of a helper tells its values then.
pytest.register_assert_rewrite("support")

from hypothesis import HealthCheck, settings
from support import process_state, warm
from support.corpora import WORDS, texts
from support.data_sets import (
    VOCABULARY_SIZE,
    MakeDataset,
    WriteDataset,
    byte_tokenizer,
    make_documents,
    random_rows,
    rows_of_ids,
    write_rows,
)
from support.false_engine import trained
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

from tokenfeed.pipeline.format.schema import Task, task_columns

if TYPE_CHECKING:
    from support.simulated_clocks import SimulatedClock
    from support.simulated_cuda import SimulatedCuda

# Otherwise each of the hundreds of processes that tests start compiles the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tests pass inside of a job with ranks and beside a user's own settings of stores and trackers.
for name in [*os.environ]:
    if name.startswith(
        (
            "TOKENFEED_REMOTE",
            "TOKENFEED_CACHE",
            "AWS_",
            "AZURE_",
            "GOOGLE_",
            "SLURM_",
            "OMPI_",
            "PMI_",
        )
    ):
        del os.environ[name]
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WANDB_PROJECT", "COLUMNS"):
    os.environ.pop(name, None)
# Programs of tests find `support`.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads would spin where tests share cores

_IN_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 4 << 30
if (
    _IN_MEMORY.is_dir()
    and shutil.disk_usage(_IN_MEMORY).free > _ROOM_BYTES
    and not os.statvfs(_IN_MEMORY).f_flag & os.ST_NOEXEC  # tests write programs
):
    _folder = _IN_MEMORY / "tokenfeed-tests"  # a disk would make the tests wait
    _folder.mkdir(exist_ok=True)
    os.environ.setdefault("TMPDIR", str(_folder))

os.fsync = lambda descriptor: None  # no test cuts the power, and a tenth of the time was waiting
gc.disable()  # until all is imported: a fifth of that time

# No deadline: shared machines pause, and that is no failure.
# Fixtures serve all examples of a test, and a busy machine draws slowly.
UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
for name, count in (("tokenfeed", 16), ("long", 250)):
    settings.register_profile(
        name, deadline=None, max_examples=count, suppress_health_check=UNCHECKED
    )
settings.load_profile("tokenfeed")


UNIT = f"{Path(__file__).parent}/unit/"


def pytest_configure(config: pytest.Config) -> None:
    """Let all processes of a run with `-n` share the process that tests fork, except for a run of
    unit tests, which fork none."""
    is_worker = hasattr(config, "workerinput")
    if (
        getattr(config.option, "numprocesses", 0)
        and not is_worker
        and "tests/unit" not in config.args
    ):
        warm.share()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and long ones as slow; files with slow tests come first, so that
    none is left last. A test of real clocks that fails runs twice more: a wrong share fails each
    time, a pause of a shared machine does not."""
    for item in items:
        if item.get_closest_marker("clock"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=2))
        item.add_marker("unit" if str(item.path).startswith(UNIT) else "commands")
        if item.get_closest_marker("long"):
            item.add_marker("slow")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """All is imported: collections skip it from now on, each 0.2 s with torch and hypothesis."""
    gc.freeze()
    gc.get_freeze_count = lambda: 1  # each run of the loop asks, and counting takes 0.04 s
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def no_garbage() -> Iterator[None]:
    """Collections need not look at what was made before this module either."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """No test finds what another one has left."""
    with process_state.kept():
        yield


@pytest.fixture(scope="session")
def write_dataset() -> WriteDataset:
    """Writes given ids: (folder, {split: (ids, lengths)}, vocabulary_size) -> folder."""

    def write(
        folder: Path, splits: dict[str, tuple[np.ndarray, np.ndarray]], vocabulary_size: int
    ) -> Path:
        rows = {split: rows_of_ids(*arrays, vocabulary_size) for split, arrays in splits.items()}
        return write_rows(folder, rows, vocabulary_size)

    return write


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """Makes random rows of given lengths, each time in a new folder: (lengths, num_shards=2)."""

    def make(
        lengths: np.ndarray | list[int],
        num_shards: int = 2,
        *,
        task: Task = "lm",
        pairs: bool = False,
        label_names: tuple[str, ...] = (),
    ) -> Path:
        names = (tmp_path / f"set{number}" for number in itertools.count(1))
        return write_rows(
            next(name for name in names if not name.exists()),
            {"train": random_rows(np.asarray(lengths), task, pairs=pairs)},
            VOCABULARY_SIZE,
            num_shards,
            task=task,
            columns=task_columns(task, pairs=pairs),
            label_names=label_names,
        )

    return make


@pytest.fixture(scope="session")
def realistic_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `folder` is a copy of."""
    from support.delivery import (  # with torch, which some tests never need
        realistic_lengths,
        small_batches,
    )

    with pytest.MonkeyPatch.context() as patch:
        small_batches(patch)
        rows = {"train": random_rows(realistic_lengths())}
        return write_rows(tmp_path_factory.mktemp("rows") / "set", rows, VOCABULARY_SIZE, 3)


@pytest.fixture
def folder(realistic_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows of real lengths, in three shards and several windows."""
    from support.delivery import small_batches

    small_batches(monkeypatch)
    return shutil.copytree(realistic_rows, tmp_path / "set1")


@pytest.fixture
def small_folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    """120 rows of real lengths, in three shards and several windows."""
    from support.delivery import realistic_lengths, small_batches

    small_batches(monkeypatch)
    return make_dataset(realistic_lengths(120, mean=4.5), num_shards=3)


@pytest.fixture
def both_splits(
    write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """400 rows of each split, of ten tokens each; one window has 100 of them."""
    monkeypatch.setattr("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 250)
    part = np.arange(4000) % 997 + 1, np.full(400, 10)
    return write_dataset(tmp_path / "both", {"train": part, "validation": part}, 1000)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator["SimulatedCuda"]:
    """A CUDA device that is simulated."""
    from support.simulated_cuda import simulate

    with simulate(monkeypatch) as cuda:
        yield cuda


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> "SimulatedClock":
    """The host's clock, which only sleeps move."""
    from support.simulated_clocks import SimulatedClock

    return SimulatedClock(monkeypatch)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader workers are forks. In `test_workers.py` and others they are programs."""
    from support.processes import FORKING

    monkeypatch.setattr("tokenfeed.pipeline.processes.subprocess", FORKING)


@pytest.fixture
def cold_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of `pretokenize` import what they find, as on a command line. They are forks of the
    warm process otherwise."""
    monkeypatch.setattr(warm, "PROGRAMS", subprocess)


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of several shards, both splits, with one reject; only to be read."""
    return make_documents(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="session")
def text_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set that `pretokenize` made of 60 texts, with 300 ids; only to be read."""
    from support.commands import run

    folder = tmp_path_factory.mktemp("texts")
    (folder / "in").mkdir()
    for number, text in enumerate(texts(60)):
        (folder / "in" / f"{number}.txt").write_text(text)
    run(folder / "in", folder / "out", "--vocab-size", 300)
    return folder / "out"


@pytest.fixture(scope="session")
def counting(tmp_path_factory: pytest.TempPathFactory, write_dataset: WriteDataset) -> Path:
    """2,000 rows for training and 24 for validation that count upwards; only to be read."""
    from support.training import write_counting

    return write_counting(write_dataset, tmp_path_factory.mktemp("counting"))


@pytest.fixture(scope="session")
def few_rows(tmp_path_factory: pytest.TempPathFactory, write_dataset: WriteDataset) -> Path:
    """400 rows for training and 20 for validation that count upwards; only to be read."""
    from support.training import write_counting

    folder = tmp_path_factory.mktemp("few")
    return write_counting(write_dataset, folder, rows=400, validation_rows=20)


@pytest.fixture(scope="session")
def every_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set of each task, and one of pairs of texts; only to be read."""
    from support.training import write_every_task

    return write_every_task(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="session")
def lm_rows(every_task: Path) -> Path:
    """150 random rows of the task `lm`; only to be read."""
    return every_task / "lm"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer.json."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_tokenizer(WORDS, end="</s>").save(str(path))
    return path


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A tokenizer of bytes, with a token that was added."""
    made = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())
    made.add_tokens([AddedToken("snake_case", special=False)])
    return made


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """60 text files and a .jsonl with two bad lines and an empty text."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index, text in enumerate(texts(60)):
        (folder / f"{index:02}.txt").write_text(text)
    lines = [json.dumps({"text": text}) for text in ["", *texts(200, seed=1)]]
    (folder / "lines.jsonl").write_text("\n".join([*lines, "{", '{"text": 1}']))
    return folder
