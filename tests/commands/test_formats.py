"""Every format that a corpus may have: the same rows, the same care for what cannot be used."""

import subprocess
import sys
from pathlib import Path

from support.corpora import (
    random_texts,
    write_batches,
)

CUT_SHORT = """
import os, sys
from pathlib import Path
from tokenfeed.tools.corpus.units import read_records
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.corpus.units import cut_units
from tokenfeed.pipeline.errors import CorpusError

path = sys.argv[1]
sources = find_corpus((path,), out=Path(path + ".out"), field="text").sources
(unit,) = cut_units(sources, 10**9)
records = read_records(unit.parts[0], {"text": FieldKind.TEXT})
next(records)
os.truncate(path, os.path.getsize(path) // 2)
try:
    list(records)
except CorpusError as error:
    print(error)
"""


def test_an_arrow_file_cut_short_under_the_reader_is_an_error_and_no_crash(tmp_path: Path) -> None:
    write_batches(tmp_path / "a.arrow", random_texts(), None)
    command = [sys.executable, "-c", CUT_SHORT, str(tmp_path / "a.arrow")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.returncode
    assert "a.arrow: changed while the corpus was read" in done.stdout
