"""Workers of a cluster: whatever it does with what it is given, the bytes are those of one."""

import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import texts
from support.data_sets import files_of
from support.false_engine import false_engine, sampled_document
from support.pretokenizing import CarelessExecutor, make, on_cluster, with_fast_engine
from tokenizers import Tokenizer

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.store import LocalStore
from tokenfeed.tools.jobs import crew


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for number, text in enumerate(texts(150, seed=5)):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def fast_tokenizer(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_level.save(str(path))
    return path


@pytest.fixture(scope="module")
def undisturbed(
    documents: Path, fast_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    with pytest.MonkeyPatch.context() as patch:
        with_fast_engine(patch)
        made = make(documents, out, fast_tokenizer)
    assert made.units > 5
    assert made.engine.startswith("gigatoken")
    return files_of(out)


@settings(max_examples=3)
@given(seed=st.integers(0, 1000))
def test_units_done_twice_late_and_in_any_order_give_the_bytes_of_one_process(
    seed: int, documents: Path, fast_tokenizer: Path, undisturbed: dict[str, bytes]
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        with_fast_engine(patch, crew=True)
        executor = CarelessExecutor(seed)
        on_cluster(patch, executor)
        out = Path(folder, "out")
        made = make(documents, out, fast_tokenizer, runner="dask")
        assert executor.done == made.units + 1  # and the questions of the audit
        assert files_of(out) == undisturbed


def test_threads_of_one_process_do_not_share_an_encoder(
    documents: Path,
    tmp_path: Path,
    fast_tokenizer: Path,
    undisturbed: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_fast_engine(monkeypatch, crew=True)
    on_cluster(monkeypatch, ThreadPoolExecutor(3))
    make(documents, tmp_path / "out", fast_tokenizer, runner="dask")
    assert files_of(tmp_path / "out") == undisturbed


def test_a_cluster_without_workers_is_said_once(
    documents: Path,
    tmp_path: Path,
    fast_tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with_fast_engine(monkeypatch, crew=True)
    on_cluster(monkeypatch, CarelessExecutor(0), num_workers=0)
    make(documents, tmp_path / "out", fast_tokenizer, runner="dask")
    assert caplog.text.count("the cluster has no workers: waiting for some") == 1


def test_paths_from_the_working_directory_mean_the_same_to_workers_elsewhere(
    documents: Path,
    fast_tokenizer: Path,
    undisturbed: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Elsewhere(CarelessExecutor):
        def submit(self, *given: Any, **named: Any) -> "Future[Any]":
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir("/")
                return super().submit(*given, **named)

    with_fast_engine(monkeypatch, crew=True)
    on_cluster(monkeypatch, Elsewhere(1))
    monkeypatch.chdir(documents.parent)
    (documents.parent / "out").mkdir()
    make(Path(documents.name), Path("out"), fast_tokenizer, runner="dask")
    names = undisturbed.keys() - {".made_by.json", "sources.jsonl", "manifest.json"}
    made = files_of(documents.parent / "out")
    assert {name: made[name] for name in names} == {name: undisturbed[name] for name in names}


class Belated(Executor):
    """Does what it was given first once more when all else is done."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._given: list[tuple[bytes, Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **named: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(fn(*args))
        self._given.append((args[0], args[1]))
        first = [each for each in self._given if each[0] == self._given[0][0]]
        others = len(self._given) - len(first)
        if others == self._units + 1:  # the units, and the questions of the audit
            for each in first:
                fn(*each)
        return future


@pytest.mark.slow
def test_an_engine_found_wrong_in_the_middle_makes_no_byte_of_what_is_late(
    tmp_path: Path,
    fast_tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, text in enumerate([*texts(80, seed=1), sampled_document("LIE", 3_000)]):
        (corpus / f"{number:03}.txt").write_text(text)
    monkeypatch.setitem(sys.modules, "gigatoken", false_engine())
    with_fast_engine(monkeypatch)
    units = make(corpus, tmp_path / "plain", fast_tokenizer).units
    with_fast_engine(monkeypatch, crew=True)
    on_cluster(monkeypatch, Belated(units))
    monkeypatch.setattr(crew.Job, "check", lambda job: None)  # it was checked before
    make(corpus, tmp_path / "out", fast_tokenizer, runner="dask")
    assert Manifest.read(tmp_path / "out").tokenizer.engine == "tokenizers"
    assert files_of(tmp_path / "out") == files_of(tmp_path / "plain")
    assert "units are missing or damaged" in caplog.text


def test_workers_that_do_not_share_the_folder_or_the_packages_are_refused(
    documents: Path, tmp_path: Path, fast_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fast_engine(monkeypatch, crew=True)
    on_cluster(monkeypatch, CarelessExecutor(0))
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        seen = iter([crew.versions()])  # of this command; the worker has others
        patch.setattr(crew, "versions", lambda: next(seen, ["pyarrow 1.0"]))
        with pytest.raises(ConfigError, match=r"has pyarrow 1\.0, where this command has"):
            make(documents, out, fast_tokenizer, runner="dask")
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "has", lambda output, info: False)
        with pytest.raises(ConfigError, match="Give an output folder that all machines share"):
            make(documents, out, fast_tokenizer, runner="dask")
    make(documents, out, fast_tokenizer, runner="dask")


def test_a_unit_that_the_cluster_gives_up_is_named_and_the_same_command_continues(
    documents: Path,
    tmp_path: Path,
    fast_tokenizer: Path,
    undisturbed: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(CarelessExecutor):
        def submit(self, *given: Any, **named: Any) -> "Future[Any]":
            if self.done == 5:
                future: Future[Any] = Future()
                future.set_exception(RuntimeError("4 workers died\nat it"))
                return future
            return super().submit(*given, **named)

    with_fast_engine(monkeypatch, crew=True)
    on_cluster(monkeypatch, Failing(1))
    with pytest.raises(TokenfeedError) as error:
        make(documents, tmp_path / "out", fast_tokenizer, runner="dask")
    assert "has given up unit" in str(error.value)
    assert "(RuntimeError: 4 workers died); 4 of" in str(error.value)
    with_fast_engine(monkeypatch)
    made = make(documents, tmp_path / "out", fast_tokenizer)  # on this machine
    assert made.resumed_units == 4
    assert files_of(tmp_path / "out") == undisturbed
