"""Golden values of delivery: the rows of every batch in their order, all tensors, and states.

Eight kinds of data sets, three policies, three ways to read, 1, 2 and 4 ranks; then the options of
policies and loaders. Each value is made twice: without workers, and with a break in the middle,
after which one rank has two workers. `delivery.json` has digests for each case:

- order: where each row of a batch comes from, and where steps end
- tensors: everything that a batch has
- states: what `state_dict` returns after every round

The compression of shards belongs to pyarrow, and states and orders of stages depend on checksums.
With another version of pyarrow than that of `delivery.json`, these are not compared.

Classes and scores belong to a whole row, so `Packed` refuses them.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from support.golden import (
    KEPT,
    KINDS,
    digest_of,
    make_data_set,
    order_of,
    save_tokenizer,
    values_of,
)

from tokenfeed import Batch, Fixed, Manifest, Mixture, Packed, Padded, ShardLoader, Stage
from tokenfeed.pipeline.errors import ConfigError

RECORDS = {"preferences": 40, "chat": 60}
WINDOW_TOKENS = {"preferences": 1200}
POLICIES: dict[str, Any] = {
    "padded": Padded(max_tokens=256),
    "packed": Packed(sequence_length=64, batch_size=4),
    "fixed": Fixed(batch_size=6),
}
OF_ROWS = ("classes", "pairs")
EVERY = [
    f"{kind} {policy} {way} on {ranks}"
    for kind in KINDS
    for policy in POLICIES
    if not (kind in OF_ROWS and policy == "packed")
    for way in ("one", "mixture", "stages")
    for ranks in (1, 2, 4)
]


SELDOM = ("mixture on 1", "mixture on 4", "stages on 1", "stages on 2")
"""Ways on numbers of ranks that only `make test-long` delivers: of the others, each way is on one
number of ranks at least, and each number has some way."""


def marks_of(case: str) -> list[pytest.MarkDecorator]:
    """Which of the suites deliver a case."""
    return [pytest.mark.long] if case.endswith(SELDOM) else []


def roll(row: Mapping[str, Any], generator: np.random.Generator) -> Mapping[str, Any]:
    """A `map`: the tokens of a row in a circle."""
    return {**row, "input_ids": np.roll(row["input_ids"], generator.integers(100))}


ONE_WINDOW = {"window_tokens": 1 << 20, "epochs": 2}
OPTIONS: dict[str, tuple[str, Any, int, dict[str, Any]]] = {
    "padded to multiples": ("documents", Padded(256, multiple_of=8), 2, {}),
    "padded and filled": ("documents", Padded(256, multiple_of=16, last="fill"), 2, {}),
    "padded, rest dropped": ("documents", Padded(256, last="drop"), 2, {}),
    "padded, long rows truncated": ("documents", Padded(96, long_rows="truncate"), 2, {}),
    "padded, short sequences": ("documents", Padded(128, sequence_length=32), 2, {}),
    "padded in random order": ("classes", Padded(256, spread=1.0), 2, {}),
    "padded in wide bands": ("documents", Padded(64, spread=0.5), 2, ONE_WINDOW),
    "fixed and filled": ("tags", Fixed(6, multiple_of=8, last="fill"), 2, {}),
    "fixed, rest dropped": ("tags", Fixed(6, last="drop"), 2, {}),
    "packed by concatenation": ("documents", Packed(64, 4, split=True), 2, {}),
    "packed and cropped": ("documents", Packed(64, 4, long_rows="crop"), 2, {}),
    "packed and truncated": ("documents", Packed(64, 4, long_rows="truncate"), 2, {}),
    "packed and filled": ("documents", Packed(64, 4, last="fill"), 2, {}),
    "packed, rest dropped": ("documents", Packed(32, 2, last="drop"), 2, {}),
    "packed with a first token": ("documents", Packed(64, 4, begin_token=90), 2, {}),
    "windows in file order": ("documents", Padded(256), 2, {"shuffle": False}),
    "rows in file order": ("documents", Padded(256), 1, {"order": "file"}),
    "packed rows in file order": ("documents", Packed(64, 4, split=True), 1, {"order": "file"}),
    "packed pieces in file order": ("documents", Packed(64, 4), 1, {"order": "file"}),
    "another seed": ("documents", Padded(256), 2, {"seed": 7}),
    "two epochs": ("documents", Padded(256), 2, {"epochs": 2}),
    "one window": ("documents", Padded(256), 2, ONE_WINDOW),
    "steps of six": ("documents", Padded(256), 4, {"micro_batches_per_step": 6}),
    "steps of two": ("documents", Padded(256), 4, {"micro_batches_per_step": 2}),
    "fillers of classes": ("classes", Fixed(6), 4, {"micro_batches_per_step": 6}),
    "fillers of scores": ("pairs", Padded(256), 4, {"micro_batches_per_step": 6}),
    "fillers of tags": ("tags", Packed(64, 4), 4, {"micro_batches_per_step": 6}),
    "validation": ("chat", Padded(256), 2, {"split": "validation"}),
    "last answers": ("chat", Padded(256), 2, {"targets": "last"}),
    "all tokens": ("chat", Packed(128, 4), 2, {"targets": "all"}),
    "words of anybody": ("preferences", Padded(256), 2, {"targets": {"text", "user"}}),
    "another ignored index": ("completions", Padded(256), 1, {"ignore_index": -1}),
    "cut completions": ("completions", Padded(96, sequence_length=16), 2, {}),
    "cut completions after a token": ("completions", Packed(16, 4, begin_token=90), 2, {}),
    "mapped rows": ("ids", Padded(256), 2, {"map": roll, "epochs": 2}),
}
"""Case -> kind, policy, ranks and options."""
STREAMS = [f"stream {stream} of 2" for stream in range(2)]
ENDS = ["a source that ends", "a source that ends before others"]
OWN = ["stages with their own batching", "stages without an end"]
SKIPPED = ["skipped rows"]
ORIGINS = [f"origins of {kind}" for kind in ("documents", "ids")]
SHARDS = [f"{kind} {seed}" for kind in KINDS for seed in (1, 2)]
CASES = ["pyarrow", *EVERY, *OPTIONS, *STREAMS, *ENDS, *OWN, *SKIPPED, *ORIGINS, *SHARDS]

Folders = dict[str, tuple[Path, Path]]
Round = tuple[tuple[Batch, ...], str]
"""A batch of every rank, and the state after it."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Two data sets of each kind."""
    folder = tmp_path_factory.mktemp("sets")
    tokenizer = save_tokenizer(folder / "tokenizer")

    def make(kind: str, seed: int) -> Path:
        records = RECORDS.get(kind, 120) // seed
        return make_data_set(folder / f"{kind}{seed}", kind, tokenizer, seed=seed, records=records)

    return {kind: (make(kind, 1), make(kind, 2)) for kind in KINDS}


def check(golden: Any, case: str, data: Any, ranks: int = 1, **options: Any) -> None:
    """Compare what loaders of all ranks deliver together with the golden value, twice."""
    rounds, kept = options.pop("rounds", None), options.pop("kept", ())

    def start(num_workers: int) -> list[ShardLoader]:
        """Loaders of all ranks; the last one has workers."""
        workers = [0] * (ranks - 1) + [num_workers]
        each = [{"rank": rank, "world_size": ranks} | options for rank in range(ranks)]
        return [ShardLoader(data, num_workers=workers.pop(0), **own) for own in each]

    def deliver(loaders: list[ShardLoader], most: int | None) -> Iterator[Round]:
        feeds = [islice(loader, most) for loader in loaders]
        for batches in zip(*feeds, strict=True):
            (state,) = {json.dumps(loader.state_dict(), sort_keys=True) for loader in loaders}
            yield batches, state
        for loader in loaders:
            loader.close()

    def values(rounds: list[Round]) -> dict[str, str]:
        flat = [batch for batches, _ in rounds for batch in batches]
        return {
            "order": digest_of(value for batch in flat for value in order_of(batch)),
            "tensors": digest_of(value for batch in flat for value in values_of(batch, kept)),
            "states": digest_of(("state", state) for _, state in rounds),
        }

    whole = [*deliver(start(0), rounds)]
    half = len(whole) // 2
    resumed = start(2)
    for loader in resumed:
        loader.load_state_dict(json.loads(whole[half - 1][1]))
    parts = [*whole[:half], *deliver(resumed, None if rounds is None else rounds - half)]
    made = [values(whole), values(parts)]
    expected = golden.expected(case, made[0])
    if golden.expected("pyarrow", pyarrow.__version__) != pyarrow.__version__:
        names = () if "stages" in case else ("order", "tensors")
        made, expected = [
            [{name: value[name] for name in names} for value in made],
            {name: expected[name] for name in names},
        ]
    assert made == [expected] * 2


@pytest.mark.parametrize("case", SHARDS)
def test_shards_are_the_same(case: str, golden: Any, folders: Folders) -> None:
    """Orders of stages and states depend on them."""
    kind, seed = case.split()
    made = Manifest.read(folders[kind][int(seed) - 1]).fingerprint
    if golden.expected("pyarrow", pyarrow.__version__) != pyarrow.__version__:
        pytest.skip("another version of pyarrow compresses")
    assert made == golden.expected(case, made)


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks_of(case)) for case in EVERY])
def test_loader_delivers_the_same_rows_and_tensors(
    case: str, golden: Any, folders: Folders, forked_workers: None
) -> None:
    kind, policy, way, _, ranks = case.split()
    one, other = folders[kind]
    tokens = WINDOW_TOKENS.get(kind, 600)
    options: dict[str, Any] = {"batching": POLICIES[policy], "window_tokens": tokens}
    data: Any = one
    if way != "one":
        options["micro_batches_per_step"] = 4
        data = Mixture({one: 2, other: 1})
    if way == "stages":
        first = Stage({one: 3, other: 1}, until_tokens=2 * tokens)
        data = [first, Stage({other: 1}, until_tokens=3 * tokens)]
    check(golden, case, data, int(ranks), kept=KEPT.get(kind, ()), **options)


@pytest.mark.parametrize("case", OPTIONS)
def test_option_delivers_the_same_rows_and_tensors(
    case: str, golden: Any, folders: Folders, forked_workers: None
) -> None:
    kind, batching, ranks, options = OPTIONS[case]
    options = {"batching": batching, "window_tokens": WINDOW_TOKENS.get(kind, 600)} | options
    check(golden, case, folders[kind][0], ranks, kept=KEPT.get(kind, ()), **options)


@pytest.mark.parametrize("case", STREAMS)
def test_stream_delivers_the_same_rows_and_tensors(
    case: str, golden: Any, folders: Folders, forked_workers: None
) -> None:
    stream = int(case.split()[1])
    options: dict[str, Any] = {"num_streams": 2, "epochs": None, "rounds": 20}
    own = {"rank": stream, "world_size": 2, "batching": Padded(256), "window_tokens": 600}
    check(golden, case, folders["documents"][0], **options, **own)


@pytest.mark.parametrize(("case", "exhausted"), [*zip(ENDS, ("stop", "continue"), strict=True)])
def test_mixture_ends_at_the_same_row(
    case: str, exhausted: Any, golden: Any, folders: Folders, forked_workers: None
) -> None:
    one, other = folders["documents"]
    mixture = Mixture({one: 1, other: 2}, exhausted=exhausted)
    check(golden, case, mixture, 2, batching=Padded(256), window_tokens=600)


def test_stages_with_their_own_batching_deliver_the_same(
    golden: Any, folders: Folders, forked_workers: None
) -> None:
    one, other = folders["chat"]
    own = Stage({other: 1}, until_tokens=4000, batching=Packed(128, 4), targets="last")
    stages = [Stage({one: 1}, until_tokens=2000), own]
    check(golden, OWN[0], stages, 2, batching=Padded(256), window_tokens=600)


def test_stages_without_an_end_deliver_the_same(
    golden: Any, folders: Folders, forked_workers: None
) -> None:
    one, other = folders["documents"]
    stages = [Stage({one: 1}, until_tokens=2000), Stage({one: 1, other: 1})]
    options: dict[str, Any] = {"epochs": None, "rounds": 40, "window_tokens": 600}
    check(golden, OWN[1], stages, 2, batching=Padded(256), **options)


def test_skipped_rows_have_no_targets(golden: Any, folders: Folders, forked_workers: None) -> None:
    one, _ = folders["documents"]
    skip = {one: [(3, 40), (90, 91)]}
    check(golden, SKIPPED[0], one, 2, skip=skip, batching=Padded(256), window_tokens=600)


@pytest.mark.parametrize("case", ORIGINS)
def test_explain_names_the_same_records(case: str, golden: Any, folders: Folders) -> None:
    one, other = folders[case.split()[-1]]
    options: dict[str, Any] = {"window_tokens": 600, "num_workers": 0}
    loader = ShardLoader(Mixture({one: 2, other: 1}), batching=Packed(32, 4), **options)
    found = [
        (Path(each.data_set).name, each.record, each.start, each.stop, each.row)
        for batch in islice(loader, 5)
        for each in loader.explain(batch)
    ]
    made = digest_of([("origins", json.dumps(found))])
    assert made == golden.expected(case, made)


@pytest.mark.parametrize("kind", OF_ROWS)
def test_packed_refuses_labels_of_whole_rows(kind: str, folders: Folders) -> None:
    with pytest.raises(ConfigError, match="label"):
        ShardLoader(folders[kind][0], batching=POLICIES["packed"])
