"""Rows of real text, exported for another project and read by its own code, and the other way.

The packages of these projects are not installed for `make test`; each test is skipped without its
own.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.commands import run
from support.data_sets import rows_in

from tokenfeed import pretokenize
from tokenfeed.tools.data_sets.export import Format, export_data_set

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the peers

Lists = list[list[int]]
CORPUS = Path(__file__).parent


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source code of these tests, as a data set with a tokenizer of its own."""
    out = tmp_path_factory.mktemp("real") / "out"
    run(CORPUS, out, "--vocab-size", 2000, "--validation", 0)
    return out


def read_megatron(peer: Any, folder: Path) -> Lists:
    return [row.tolist() for row in peer.IndexedDataset(str(folder / "train"))]


def write_megatron(peer: Any, folder: Path, rows: Lists) -> Path:
    """Every third document has two sequences."""
    builder = peer.IndexedDatasetBuilder(str(folder / "train.bin"), dtype=np.uint16)
    for number, row in enumerate(rows):
        cut = len(row) // 2 if number % 3 == 0 else 0
        builder.add_document(torch.tensor(row), [cut, len(row) - cut] if cut else [len(row)])
    builder.finalize(str(folder / "train.idx"))
    return folder / "train.bin"


def read_olmo(peer: Any, folder: Path) -> Lists:
    ids = np.memmap(folder / "train.npy", np.uint16, "r")
    found = peer.iter_document_indices(str(folder / "train.npy"), dtype=np.uint16)
    return [ids[start:end].tolist() for start, end in found]


def write_olmo(peer: Any, folder: Path, rows: Lists) -> Path:
    path = folder / "train.npy"
    peer.write_array_to_disk(np.concatenate(rows).astype(np.uint16), path)
    peer.write_document_indices(path, dtype=np.uint16, eos_token_id=rows[0][-1])
    return path


class Peer(NamedTuple):
    module: str
    read: Callable[[Any, Path], Lists]
    write: Callable[[Any, Path, Lists], Path]

    def imported(self) -> Any:
        if find_spec(self.module.partition(".")[0]) is None:
            pytest.skip(f"{self.module} is not installed")
        return pytest.importorskip(self.module, exc_type=ImportError)


PEERS: dict[Format, Peer] = {
    "megatron": Peer("megatron.core.datasets.indexed_dataset", read_megatron, write_megatron),
    "olmo": Peer("olmo_core.data.utils", read_olmo, write_olmo),
}


@pytest.mark.parametrize("to", PEERS)
def test_the_reader_of_a_project_reads_the_exported_rows(
    to: Format, tmp_path: Path, real: Path
) -> None:
    peer = PEERS[to].imported()
    export_data_set(str(real), tmp_path / "out", to)
    assert PEERS[to].read(peer, tmp_path / "out") == rows_in(real)


@pytest.mark.parametrize("to", PEERS)
def test_rows_written_by_a_project_are_read_as_they_are(
    to: Format, tmp_path: Path, real: Path
) -> None:
    peer, rows, out = PEERS[to].imported(), rows_in(real), tmp_path / "out"
    written = PEERS[to].write(peer, tmp_path, rows)
    pretokenize(written, out, task="ids", tokenizer=real, validation=0)
    assert rows_in(out) == rows


def test_rows_written_by_datatrove_are_read_as_they_are(tmp_path: Path, real: Path) -> None:
    tokenizer = pytest.importorskip("datatrove.pipeline.tokens.tokenizer", exc_type=ImportError)
    rows, out = rows_in(real), tmp_path / "out"
    file = tokenizer.TokenizedFile(str(tmp_path), "train.ds", save_final_metadata=True)
    for row in rows:
        file.write(row, None)
    file.close()
    pretokenize(tmp_path / "train.ds", out, task="ids", tokenizer=real, validation=0)
    assert rows_in(out) == rows
