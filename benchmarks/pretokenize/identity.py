"""Are the ids in the shards those of `tokenizers`? Whole corpora, document by document.

Runs the real command over each corpus and over texts that hypothesis makes up, reads the shards
back, and compares every row with `Tokenizer.encode` of its document, one at a time, plus the end
id. Both engines are thereby compared too, far beyond the audit's sample; where they differ, the
command must have noticed by itself.

    python -m benchmarks.pretokenize.identity --tokenizers gpt2/ llama2/ --corpora linux-doc/
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from benchmarks.protocol import write_result
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.shard import ShardReader

RANDOM_TEXTS = 10_000
BATCH = 256


def random_texts(path: Path) -> Path:
    """Write texts that hypothesis makes up, as JSON Lines."""
    texts: list[str] = []

    @settings(
        max_examples=RANDOM_TEXTS,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.text(max_size=200))
    def collect(text: str) -> None:
        texts.append(text)

    collect()
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def rows_by_place(folder: Path, manifest: Manifest) -> Iterator[tuple[str, int, np.ndarray]]:
    """Every row with the file and the record it came from."""
    sources = [json.loads(line)["path"] for line in (folder / "sources.jsonl").open()]
    for split in manifest.splits.values():
        for shard in split.shards:
            reader = ShardReader.open(folder, manifest, shard)
            for index in range(shard.batches):
                rows, _ = reader.read(index)
                places = zip(
                    rows.per_row["origin_file"], rows.per_row["origin_record"], strict=True
                )
                pieces = np.split(rows.ids, np.cumsum(rows.lengths)[:-1])
                for (file, record), ids in zip(places, pieces, strict=True):
                    yield sources[file], int(record), ids


def reference(tokenizer: Path) -> Tokenizer:
    """The tokenizer without truncation, padding and special tokens in text."""
    made = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True
    return made


class Texts:
    """Documents by file and record number."""

    def __init__(self) -> None:
        self._lines: dict[str, list[bytes]] = {}

    def get(self, path: str, record: int) -> str:
        """The text of a document."""
        if not path.endswith(".jsonl"):
            return Path(path).read_bytes().decode("utf-8-sig")  # as the command reads it
        if path not in self._lines:
            self._lines[path] = Path(path).read_bytes().split(b"\n")
        text: str = json.loads(self._lines[path][record])["text"]
        return text


def check(tokenizer: Path, corpus: Path, out: Path) -> dict[str, Any]:
    """Pretokenize a corpus and compare every row."""
    command = [sys.executable, "-m", "tokenfeed.tools.pretokenize", str(corpus), str(out)]
    run = subprocess.run(
        [*command, "--tokenizer", str(tokenizer), "--exclude", "site-packages", "--json"],
        check=True,
        capture_output=True,
    )
    summary = json.loads(run.stdout)
    manifest, encode, texts = Manifest.read(out), reference(tokenizer), Texts()
    end = [] if manifest.tokenizer.end_id is None else [manifest.tokenizer.end_id]
    documents = wrong = 0
    rows = list(rows_by_place(out, manifest))
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        given = [texts.get(path, record) for path, record, _ in batch]
        encodings = encode.encode_batch(given, add_special_tokens=False)
        for (_, _, ids), encoding in zip(batch, encodings, strict=True):
            documents += 1
            wrong += ids.tolist() != encoding.ids + end
    return {
        "tokenizer": tokenizer.name,
        "corpus": corpus.name,
        "documents": documents,
        "not_written": summary["empty"] + summary["rejected"],
        "wrong": wrong,
        "engine": summary["engine"],
        "audited": summary["audited"],
        "audit_differences": summary["differences"],
        "routed": summary["routed"],
        "mb_per_s": summary["mb_per_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokenizers", nargs="+", type=Path, required=True)
    parser.add_argument("--corpora", nargs="*", type=Path, default=[])
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        made_up = random_texts(Path(folder) / "hypothesis.jsonl")
        standard_library = Path(sysconfig.get_path("stdlib"))
        for tokenizer in arguments.tokenizers:
            for corpus in (made_up, standard_library, *arguments.corpora):
                out = Path(folder) / f"{tokenizer.name}-{corpus.name}"
                results.append(check(tokenizer, corpus, out))
                print(results[-1], flush=True)
    write_result("identity", results)
    sys.exit(any(result["wrong"] for result in results))


if __name__ == "__main__":
    main()
