"""The loaders to compare with: how each writes the rows, how it reads them, what its users get.

Every peer is set up as its documentation says, with int64 batches of the same rows: random batches
padded to their longest row, or rows of one length. All pad with the same function. Imports stand
inside the functions: a peer may be missing, and this file runs where tokenfeed is not installed.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

SEQUENCE = 2048
BATCH_ROWS = {"short": 256, "check": 256, "medium": 32, "documents": 8, "chat": 8}
IS_TARGET, IGNORED = 1 << 15, -100  # see data.py, which needs tokenfeed

MIXED = {"documents": 0.7, "short": 0.3}
"""Shares of the tokens that the task `mixture` asks for."""
MIXED_ROWS = 32

Batch = dict[str, torch.Tensor]
Mixed = dict[str, tuple["Rows", Path]]
"""Rows and own folder of each part of a mixture."""


@dataclass(frozen=True)
class Stream:
    """An opened loader."""

    batches: Iterable[Any]
    """An epoch each time it is iterated, or batches without end."""
    state: Callable[[], Any] | None = None
    load: Callable[[Any], None] | None = None


class Rows(Sequence[np.ndarray]):
    """Rows of uint16 ids in a memory map, the first of so many parts of them. Documents are cut
    into rows of `SEQUENCE`, unless `whole`."""

    def __init__(self, folder: Path, kind: str, part: int = 1, *, whole: bool = False) -> None:
        self._arguments = (folder, kind, part)
        self.ids = np.asarray(np.load(folder / kind / "ids.npy", mmap_mode="r"))
        self.same_length = kind == "documents" and not whole
        self.is_chat = kind == "chat"
        self.batch_rows = BATCH_ROWS[kind]
        if self.same_length:
            self.offsets = np.arange(0, len(self.ids) + 1, SEQUENCE)
        else:
            self.offsets = np.append(0, np.cumsum(np.load(folder / kind / "lengths.npy")))
        self.offsets = self.offsets[: (len(self.offsets) - 1) // part + 1]
        self.ids = self.ids[: self.offsets[-1]]

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, self._arguments

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def grid(self) -> np.ndarray:
        """Whatever the kind, all ids in rows of one length; a view."""
        return self.ids[: len(self.ids) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)

    def collate(self, rows: Sequence[Any]) -> Batch:
        """The batch of some rows."""
        if self.is_chat:
            return labelled(pad(rows))
        return stack(rows) if self.same_length else pad(rows)

    def gather(self, indices: Sequence[int]) -> Batch:
        """The batch of the rows at `indices`, straight from the memory map."""
        if self.same_length:
            return {"input_ids": torch.from_numpy(self.grid()[np.asarray(indices)].astype("i8"))}
        return self.collate([self[index] for index in indices])


def rows_of(folder: Path, kind: str, loader: str) -> Rows:
    """The rows that a loader gets."""
    return Rows(
        folder, kind, PEERS[loader].short_part if loader in PEERS and kind == "short" else 1
    )


def pad(rows: Sequence[Any]) -> Batch:
    """Pad to the longest row."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate(rows)
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}


def labelled(batch: Batch) -> Batch:
    """Add the labels of conversations, which the ids mark by a bit."""
    is_target, ids = batch["input_ids"] >= IS_TARGET, batch["input_ids"] % IS_TARGET
    return batch | {"input_ids": ids, "labels": ids.masked_fill(~is_target, IGNORED)}


def stack(rows: Sequence[Any]) -> Batch:
    """Rows of one length need no mask."""
    return {"input_ids": torch.from_numpy(np.stack(rows).astype(np.int64))}


def collate_ids(rows: Rows, samples: Sequence[dict[str, Any]]) -> Batch:
    """The batch of samples that have a name for their ids."""
    return rows.collate([sample["input_ids"] for sample in samples])


def collate_first(rows: Rows, samples: Sequence[tuple[Any, ...]]) -> Batch:
    """The batch of samples whose ids come first."""
    return rows.collate([sample[0] for sample in samples])


def collate_tensors(rows: Rows, samples: Sequence[torch.Tensor]) -> Batch:
    """The batch of tensors."""
    return rows.collate([sample.numpy() for sample in samples])


def write_nothing(rows: Rows, folder: Path) -> None:
    """The memory map is there already."""


def table_of(rows: Rows) -> Any:
    """An Arrow table of the rows."""
    import pyarrow as pa

    offsets = pa.array(rows.offsets.astype(np.int32))
    return pa.table({"input_ids": pa.ListArray.from_arrays(offsets, pa.array(rows.ids))})


def write_datasets(rows: Rows, folder: Path) -> None:
    from datasets import Dataset

    Dataset(table_of(rows)).save_to_disk(folder / "rows")


def read_datasets(rows: Rows, folder: Path, workers: int, endless: bool) -> Stream:
    from datasets import load_from_disk

    data = load_from_disk(folder / "rows").with_format("numpy")
    return Stream(
        DataLoader(
            data,
            rows.batch_rows,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=partial(collate_ids, rows),
        )
    )


def import_streaming() -> ModuleType:
    """mosaicml-streaming imports torchvision, for images, which may be built for another torch."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            stub: Any = ModuleType(f"torchvision{name}")
            stub.__spec__ = ModuleSpec(stub.__name__, None)
            stub.VisionDataset = type("VisionDataset", (), {})
            stub.to_tensor = None
            sys.modules[stub.__name__] = stub
    import streaming

    module: ModuleType = streaming
    return module


def write_mosaic(rows: Rows, folder: Path) -> None:
    kind = f"ndarray:uint16:{SEQUENCE}" if rows.same_length else "ndarray:uint16"
    with import_streaming().MDSWriter(
        out=str(folder / "rows"),
        columns={"input_ids": kind},
        compression="zstd",
        hashes=["xxh64"],
    ) as writer:
        for row in rows:
            writer.write({"input_ids": row})


def read_mosaic(rows: Rows, folder: Path, workers: int, endless: bool) -> Stream:
    streaming = import_streaming()
    local = str(folder / "rows")
    data = streaming.StreamingDataset(shuffle=True, batch_size=rows.batch_rows, local=local)
    loader = streaming.StreamingDataLoader(
        data,
        batch_size=rows.batch_rows,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=partial(collate_ids, rows),
    )
    return Stream(loader, loader.state_dict, loader.load_state_dict)


def mix_mosaic(parts: Mixed, workers: int) -> Stream:
    streaming = import_streaming()
    streams = [
        streaming.Stream(local=str(folder / "rows"), proportion=MIXED[kind])
        for kind, (_, folder) in parts.items()
    ]
    data = streaming.StreamingDataset(streams=streams, shuffle=True, batch_size=MIXED_ROWS)
    collate = partial(collate_ids, parts["short"][0])
    return Stream(
        streaming.StreamingDataLoader(
            data, MIXED_ROWS, False, num_workers=workers, collate_fn=collate
        )
    )


def litdata_part(rows: Rows, part: range) -> Iterator[torch.Tensor]:
    """What one call of `litdata.optimize` writes."""
    for index in part:
        yield torch.from_numpy(rows[index].copy())


def write_litdata(rows: Rows, folder: Path) -> None:
    import litdata

    parts = [range(at, min(at + 2000, len(rows))) for at in range(0, len(rows), 2000)]
    settings: dict[str, Any] = {"chunk_bytes": "64MB", "compression": "zstd"}
    if rows.same_length:
        loader = litdata.TokensLoader(block_size=SEQUENCE)
        settings = {"chunk_size": SEQUENCE * 1024, "item_loader": loader}
    litdata.optimize(
        fn=partial(litdata_part, rows),
        inputs=parts,
        output_dir=str(folder / "rows"),
        num_workers=1,
        **settings,
    )


def read_litdata(rows: Rows, folder: Path, workers: int, endless: bool) -> Stream:
    import litdata

    tokens = litdata.TokensLoader(block_size=SEQUENCE) if rows.same_length else None
    data = litdata.StreamingDataset(
        str(folder / "rows"), item_loader=tokens, shuffle=True, drop_last=False
    )
    loader = litdata.StreamingDataLoader(
        data,
        batch_size=rows.batch_rows,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=partial(collate_tensors, rows),
    )
    return Stream(loader, loader.state_dict, loader.load_state_dict)


def write_grain(rows: Rows, folder: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "rows.array_record"), "group_size:1")
    for row in rows:
        writer.write(row.tobytes())
    writer.close()


def read_grain(rows: Rows, folder: Path, workers: int, endless: bool) -> Stream:
    import grain

    source = grain.sources.ArrayRecordDataSource(str(folder / "rows.array_record"))
    data = grain.MapDataset.source(source).shuffle(seed=0)
    data = data.repeat() if endless else data
    data = data.map(partial(np.frombuffer, dtype=np.uint16))
    data = data.batch(rows.batch_rows, drop_remainder=False, batch_fn=rows.collate)
    reading = grain.ReadOptions(num_threads=max(1, workers), prefetch_buffer_size=64)
    iterator = iter(data.to_iter_dataset(reading))
    return Stream(iterator, iterator.get_state, iterator.set_state)


def mix_grain(parts: Mixed, workers: int) -> Stream:
    import grain

    each = [
        grain.MapDataset.source(
            grain.sources.ArrayRecordDataSource(str(folder / "rows.array_record"))
        )
        .shuffle(seed=0)
        .repeat()
        for _, folder in parts.values()
    ]
    data = grain.MapDataset.mix(each, weights=[*MIXED.values()])
    data = data.map(partial(np.frombuffer, dtype=np.uint16)).batch(MIXED_ROWS, batch_fn=pad)
    return Stream(data.to_iter_dataset(grain.ReadOptions(max(1, workers), 64)))


def write_webdataset(rows: Rows, folder: Path) -> None:
    import webdataset

    shard_rows = min(20_000, len(rows) // 8)
    with webdataset.ShardWriter(f"{folder}/rows-%05d.tar", maxcount=shard_rows, verbose=0) as tar:
        for number, row in enumerate(rows):
            tar.write({"__key__": f"{number:08d}", "npy": row})


def read_webdataset(rows: Rows, folder: Path, workers: int, endless: bool) -> Stream:
    import webdataset

    shards = sorted(map(str, folder.glob("rows-*.tar")))
    data = webdataset.WebDataset(shards, shardshuffle=100, seed=0).shuffle(1000)
    data = data.decode().to_tuple("npy")
    data = data.batched(rows.batch_rows, collation_fn=partial(collate_first, rows))
    loader = webdataset.WebLoader(
        data, batch_size=None, num_workers=workers, persistent_workers=workers > 0
    )
    return Stream(loader)


def open_torchtitan(
    parts: Sequence[Rows], packing: str, sizes: dict[str, Any], *, repeat: bool = True
) -> Any:
    """Open torchtitan's loader of tokens in a memory map, as the README of its data layer shows.

    Args:
        parts: The documents, or two parts to mix with the weights of `MIXED`. They are packed
            first, so that weights count tokens.
        packing: Name of the config that packs them.
        sizes: Ranks and sizes of a batch, as torchtitan's trainer passes them.
        repeat: False: one epoch.
    """
    from torchtitan.components import data

    class Shift(data.SampleProcessor):  # type: ignore[misc]  # untyped
        @dataclass(kw_only=True, slots=True)
        class Config(data.SampleProcessor.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, *, context: Any) -> None: ...

        def __call__(self, row: np.ndarray, rng: Any) -> Any:
            ids = row.astype(np.int64)
            return data.TextSequence(input_ids=ids[:-1], labels=ids[1:]) if len(ids) > 1 else None

    packed = [
        getattr(data, packing)(
            dataset=data.SingleDatasetConfig(
                source=SimpleNamespace(build=lambda rows=rows, **policy: rows),
                processor=Shift.Config(),
                post_filters=(lambda sample: sample is not None,),
            )
        )
        for rows in parts
    ]
    pairs = zip(packed, MIXED.values(), strict=False)
    weighted = (data.WeightedDataset(dataset=each, weight=weight) for each, weight in pairs)
    recipe = data.DatasetMixConfig(datasets=(*weighted,)) if len(packed) > 1 else packed[0]
    return data.GrainDataLoader.Config(dataset=recipe, repeat=repeat).build(**sizes)


def read_torchtitan(rows: Rows, folder: Path, workers: int, endless: bool) -> Stream:
    return concatenated([rows])


def mix_torchtitan(parts: Mixed, workers: int) -> Stream:
    return concatenated([rows for rows, _ in parts.values()])


def concatenated(parts: Sequence[Rows]) -> Stream:
    """torchtitan's concatenation. Tokens with a label count: all but the first of each row."""
    sizes = {"max_context_length": SEQUENCE, "num_tokens_per_batch": 8 * SEQUENCE}
    sizes |= {"dp_rank": 0, "dp_world_size": 1, "tokenizer": None}
    loader = open_torchtitan(parts, "ConcatThenSplitPackingConfig", sizes)
    batches = (
        {
            "input_ids": inputs["input"][None],
            "attention_mask": (labels != -100)[None],
            "positions": inputs["positions"],
        }
        for inputs, labels in loader
    )
    return Stream(batches, loader.state_dict, loader.load_state_dict)


def write_lance(rows: Rows, folder: Path) -> None:
    import lancedb

    lancedb.connect(folder / "rows").create_table("rows", table_of(rows))


def lance_rows(batch: Any) -> list[np.ndarray]:
    """The rows of a record batch."""
    column = batch.column("input_ids")
    ends = column.offsets.to_numpy()
    return np.split(column.values.to_numpy()[: ends[-1]], ends[:-1])[1:]


def read_lance(rows: Rows, folder: Path, workers: int, endless: bool) -> Stream:
    """Its own threads read and decode: with worker processes, a run hung."""
    import lancedb
    from lancedb.streaming import StreamingDataLoader, StreamingDataset

    table = lancedb.connect(folder / "rows").open_table("rows")
    settings = {"read_batch_size": rows.batch_rows, "columns": ["input_ids"]}
    data = StreamingDataset(table, transform=lance_rows, **settings)
    loader = StreamingDataLoader(data, batch_size=rows.batch_rows, collate_fn=rows.collate)
    return Stream(loader, data.state_dict, data.load_state_dict)


class _Gathered(Dataset[Batch]):
    """A map-style data set that gives whole batches."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.rows.gather(indices)


def as_it_is(batch: Batch) -> Batch:
    return batch


def read_stateful(rows: Rows, folder: Path, workers: int, endless: bool) -> Stream:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader: Any = StatefulDataLoader(
        _Gathered(rows),
        batch_size=rows.batch_rows,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=as_it_is,
        snapshot_every_n_steps=100,
    )
    return Stream(loader, loader.state_dict, loader.load_state_dict)


def read_nodes(rows: Rows, folder: Path, workers: int, endless: bool) -> Stream:
    from torchdata import nodes

    seeded = torch.Generator().manual_seed(0)  # resuming draws the same order again
    sampler = RandomSampler(range(len(rows)), generator=seeded)
    indices = nodes.Batcher(nodes.SamplerWrapper(sampler), rows.batch_rows, drop_last=False)
    batches = nodes.ParallelMapper(indices, rows.gather, num_workers=workers, method="thread")
    loader = nodes.Loader(nodes.Prefetcher(batches, prefetch_factor=8))
    return Stream(loader, loader.state_dict, loader.load_state_dict)


def read_bound(rows: Rows, folder: Path, workers: int, endless: bool) -> Stream:
    """One gather a batch in the training process: no worker, padding, decompression or check."""
    grid, rng = rows.grid(), np.random.default_rng(0)

    def batches() -> Iterator[Batch]:
        order = rng.permutation(len(grid))
        for at in range(0, len(order), 8):
            yield {"input_ids": torch.from_numpy(grid[order[at : at + 8]].astype(np.int64))}

    return Stream(itertools.chain.from_iterable(batches() for _ in itertools.count()))


@dataclass(frozen=True)
class Peer:
    """A loader to compare with."""

    packages: tuple[str, ...]
    """Distributions it needs."""
    write: Callable[[Rows, Path], None]
    read: Callable[[Rows, Path, int, bool], Stream]
    order: str
    """How far rows are shuffled."""
    short_part: int = 1
    """Of short rows it gets this part: it reads or writes them one by one."""
    whole_rows: bool = True
    """Whether its batches contain whole rows. Only then are the rows of an epoch counted, and
    conversations have labels."""
    mix: Callable[[Mixed, int], Stream] | None = None
    """Opens the mixture of `MIXED`, with so many workers."""


PEERS = {
    "datasets": Peer(("datasets",), write_datasets, read_datasets, "all rows"),
    "mosaicml-streaming": Peer(
        ("mosaicml-streaming",), write_mosaic, read_mosaic, "blocks of rows", 8, mix=mix_mosaic
    ),
    "litdata": Peer(("litdata",), write_litdata, read_litdata, "chunks, rows in a chunk", 8),
    "grain": Peer(("grain", "array-record"), write_grain, read_grain, "all rows", 8, mix=mix_grain),
    "webdataset": Peer(
        ("webdataset",), write_webdataset, read_webdataset, "shards, a buffer of 1,000", 8
    ),
    "torchdata stateful": Peer(("torchdata",), write_nothing, read_stateful, "all rows"),
    "torchdata nodes": Peer(("torchdata",), write_nothing, read_nodes, "all rows"),
    "torchtitan": Peer(
        ("torchtitan", "grain"),
        write_nothing,
        read_torchtitan,
        "all rows",
        8,
        whole_rows=False,
        mix=mix_torchtitan,
    ),
    "lancedb": Peer(("lancedb", "pylance"), write_lance, read_lance, "all rows", 8),
    "bound: memmap gather": Peer((), write_nothing, read_bound, "all rows", whole_rows=False),
}
