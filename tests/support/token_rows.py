"""Write rows of token ids as other projects do: the bytes of their own writers."""

import gzip
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

Rows = list[list[int]]


def save_words(path: Path, size: int) -> Path:
    """Save a tokenizer of so many words between white space: w0, w1, ..."""
    vocabulary = {f"w{number}": number for number in range(size)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(path))
    return path


def ids_of(rows: Rows, width: int = 2) -> np.ndarray:
    """Return all ids, one row after another."""
    return np.array([token for row in rows for token in row], f"<u{width}")


def _ends_of(rows: Rows) -> np.ndarray:
    return np.cumsum([len(row) for row in rows])


def write_megatron(folder: Path, rows: Rows, width: int = 2) -> Path:
    """Write what `IndexedDatasetBuilder` writes. Each third document has two sequences."""
    sizes: list[int] = []
    borders = [0]
    for number, row in enumerate(rows):
        cut = len(row) // 2 if number % 3 == 0 else 0
        sizes += [cut, len(row) - cut] if cut else [len(row)]
        borders.append(len(sizes))
    places = np.append(0, np.cumsum(sizes)[:-1]) * width
    (folder / "train.bin").write_bytes(ids_of(rows, width).tobytes())
    (folder / "train.idx").write_bytes(
        b"MMIDIDX\0\0"
        + np.uint64(1).tobytes()
        + bytes([8 if width == 2 else 4])
        + np.array([len(sizes), len(borders)], "<u8").tobytes()
        + np.array(sizes, "<i4").tobytes()
        + places.astype("<i8").tobytes()
        + np.array(borders, "<i8").tobytes()
    )
    return folder / "train.bin"


def write_nanogpt(folder: Path, rows: Rows, width: int = 2) -> Path:
    """Write what `prepare.py` of nanoGPT writes: ids alone."""
    (folder / "train.bin").write_bytes(ids_of(rows).tobytes())
    return folder / "train.bin"


def write_llm_c(folder: Path, rows: Rows, width: int = 2) -> Path:
    """Write what `write_datafile` of llm.c writes: a header of 256 numbers, and ids."""
    header, ids = np.zeros(256, "<i4"), ids_of(rows, width)
    header[:3] = (*((20240520, 1) if width == 2 else (20240801, 7)), len(ids))
    (folder / "train_000001.bin").write_bytes(header.tobytes() + ids.tobytes())
    return folder / "train_000001.bin"


def write_olmo(folder: Path, rows: Rows, width: int = 2) -> Path:
    """Write what dolma writes: ids alone, and a packed table of their rows."""
    ends = _ends_of(rows).tolist()
    starts = [0, *ends[:-1]]
    lines = [
        f"{a},{b},id-{n},s.gz,{n}\n" for n, (a, b) in enumerate(zip(starts, ends, strict=True))
    ]
    (folder / "part-0.npy").write_bytes(ids_of(rows, width).tobytes())
    (folder / "part-0.csv.gz").write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    return folder / "part-0.npy"


def write_numpy(folder: Path, rows: Rows, width: int = 2) -> Path:
    """Write the ids by `numpy.save`."""
    np.save(folder / "train.npy", ids_of(rows, width))
    return folder / "train.npy"


def write_datatrove(folder: Path, rows: Rows, width: int = 2) -> Path:
    """Write what `TokenizedFile` of datatrove writes."""
    ids = ids_of(rows, width)
    (folder / "0.ds").write_bytes(ids.tobytes())
    (folder / "0.ds.index").write_bytes(_ends_of(rows).astype("<u8").tobytes())
    (folder / "0.ds.metadata").write_text(f"gpt2|{width}\n{len(ids)}\n{len(ids) / 1e3:.2f} kT")
    return folder / "0.ds"
