"""Input that this process may not read ends a run: it is no damage, and a later run reads it."""

import ctypes
import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from tokenfeed import Manifest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs capabilities of Linux")

TABLE = pa.table({"text": [f"text {number}" for number in range(40)]})
LINES = "".join(f"{json.dumps(row)}\n" for row in TABLE.to_pylist())
WRITERS: dict[str, Callable[[Path], object]] = {
    "b.jsonl": lambda path: path.write_text(LINES),
    "b.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "b.parquet": lambda path: pq.write_table(TABLE, path),
    "b.arrow": lambda path: feather.write_feather(TABLE, path),
}


def drop_rights_of_root() -> None:
    """Let the program that is started next respect the modes of files, also as root."""
    pr_capbset_drop, dac_override, dac_read_search = 24, 1, 2
    for capability in (dac_override, dac_read_search):
        ctypes.CDLL(None).prctl(pr_capbset_drop, capability, 0, 0, 0)


def made(folder: Path, tokenizer: Path) -> tuple[int, str]:
    """Return the exit code of a run, and its last line on stderr."""
    command = [sys.executable, "-m", "tokenfeed.tools.pretokenize", "corpus", "out"]
    done = subprocess.run(
        [*command, "--tokenizer", str(tokenizer), "--validation", "0"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=drop_rights_of_root,
    )
    return done.returncode, (done.stderr.splitlines() or [""])[-1]


@pytest.mark.parametrize("name", [*WRITERS, "folder"])
def test_unreadable_input_ends_the_run_and_is_read_later(
    name: str, tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text(LINES)
    hidden = tmp_path / "corpus" / name
    if name == "folder":
        hidden.mkdir()
        (hidden / "b.jsonl").write_text(LINES)
    else:
        WRITERS[name](hidden)
    mode = hidden.stat().st_mode
    hidden.chmod(0)
    code, line = made(tmp_path, tokenizer)
    assert code == 1
    assert line.startswith(f"error: corpus/{name}: cannot be read: Permission denied. Make it")
    hidden.chmod(mode)
    assert made(tmp_path, tokenizer)[0] == 0
    assert Manifest.read(tmp_path / "out").ledger.written == 80


def test_unreadable_file_beside_the_tokenizer_is_an_error(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text(LINES)
    own = tmp_path / "model"
    own.mkdir()
    source = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    shutil.copy(source, own / "tokenizer.json")
    (own / "tokenizer_config.json").write_text("{}")
    (own / "tokenizer_config.json").chmod(0)
    code, line = made(tmp_path, own)
    assert code == 1
    assert "tokenizer_config.json: cannot be read: Permission denied" in line
