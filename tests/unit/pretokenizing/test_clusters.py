"""Workers of a cluster: whatever it does with what it is given, the bytes are those of one."""

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from command import files_of, texts
from false_engine import false_engine, sampled_document
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import CarelessExecutor, make, on_cluster, with_fast_engine
from tokenizers import Tokenizer

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.run import guest


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


@settings(max_examples=8)
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


def test_paths_from_the_working_directory_mean_the_same_to_workers_elsewhere(
    documents: Path,
    tmp_path: Path,
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


@pytest.mark.parametrize("word", ["LIE", "PANIC"])
def test_an_engine_found_wrong_in_the_middle_makes_no_byte_of_what_is_late(
    word: str,
    tmp_path: Path,
    fast_tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Units of the wrong engine that are done again when the right one has done them."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, text in enumerate([*texts(80, seed=1), sampled_document(word, 3_000)]):
        (corpus / f"{number:03}.txt").write_text(text)
    with_fast_engine(monkeypatch, crew=True)
    monkeypatch.setitem(sys.modules, "gigatoken", false_engine())
    plain = tmp_path / "plain"
    with monkeypatch.context() as patch:
        with_fast_engine(patch)
        make(corpus, plain, fast_tokenizer)
    executor = CarelessExecutor(3)
    on_cluster(monkeypatch, executor)
    shutdown = executor.shutdown
    monkeypatch.setattr(executor, "shutdown", lambda **how: None)  # they come back much later
    append = guest.do_unit
    done: list[int] = []

    def late(job: bytes, unit: Any) -> Any:
        answer = append(job, unit)
        done.append(1)
        if len(done) == 14:
            shutdown()
        return answer

    monkeypatch.setattr("tokenfeed.tools.run.hired.do_unit", late)
    make(corpus, tmp_path / "out", fast_tokenizer, runner="dask")
    assert Manifest.read(tmp_path / "out").tokenizer.engine == "tokenizers"
    assert files_of(tmp_path / "out") == files_of(plain)


def test_workers_that_do_not_share_the_folder_or_the_packages_are_refused(
    documents: Path, tmp_path: Path, fast_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fast_engine(monkeypatch, crew=True)
    on_cluster(monkeypatch, CarelessExecutor(0))
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(guest, "versions", lambda: ["pyarrow 1.0"])
        with pytest.raises(ConfigError, match=r"has pyarrow 1\.0, where this command has"):
            make(documents, out, fast_tokenizer, runner="dask")
    with monkeypatch.context() as patch:
        patch.setattr(guest, "is_as_written", lambda folder, info: False)
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
