"""Which orders benchmarks/shuffle.py measures on which corpus."""

from dataclasses import dataclass, field
from typing import Any

from shuffle_peers import PEERS

__all__ = ["CASES", "COSTS", "FULL", "LINES", "MIXTURES", "PICTURED", "Case", "Mixtures"]

FULL = "full shuffle (datasets, map-style)"
LINES = (FULL, "tokenfeed padded", "mosaicml-streaming py1e, 16 nodes", "datasets buffer 10,000")
PICTURED = "documents by source"
"""What the picture shows: orders of one corpus."""


@dataclass(frozen=True, slots=True)
class Case:
    """One order."""

    name: str
    rows_a_batch: int
    """Of a peer's batches, and of those of a full shuffle."""
    epochs: int = 1
    peer: str | None = None
    """Its name; None: ours."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of ours: policy and arguments, window_tokens."""


@dataclass(frozen=True, slots=True)
class Mixtures:
    """Two corpora read as one."""

    corpora: tuple[str, str]
    weights: tuple[float, float]
    cases: tuple[Case, ...]


def ours(name: str, rows_a_batch: int, policy: str, *arguments: int, **settings: Any) -> Case:
    epochs = settings.pop("epochs", 1)
    settings |= {"policy": policy, "arguments": arguments}
    return Case(f"tokenfeed {name}", rows_a_batch, epochs, settings=settings)


def of_peers(rows_a_batch: int, epochs: int, *left_out: str) -> list[Case]:
    return [Case(n, rows_a_batch, epochs, peer=n) for n in PEERS if n not in left_out]


def windows(*padded: Any) -> list[Case]:
    """Padded, with windows of other sizes."""
    sizes = {f"window_tokens {size}M": size * 1_000_000 for size in (4, 32, 128)}
    return [ours(f"padded, {n}", *padded, window_tokens=size) for n, size in sizes.items()]


def policies(rows: int, tokens: int, sequence: int, epochs: int) -> list[Case]:
    """The three policies as they are by default, with batches of about so many tokens."""
    return [
        ours("padded", rows, "Padded", tokens, epochs=epochs),
        ours("packed", rows, "Packed", sequence, tokens // sequence, epochs=epochs),
        ours("fixed", rows, "Fixed", rows, epochs=epochs),
    ]


def small_sets() -> dict[str, list[Case]]:
    """Sets of one window, as fine-tuning has them."""
    grouped = "transformers group_by_length"
    named = [(8, ""), (32, ", 32 rows")]
    few = [
        ours("padded", 8, "Padded", 16_384, epochs=2),
        ours("packed", 8, "Packed", 2048, 8, epochs=2),
        *(ours(f"fixed{name}", rows, "Fixed", rows, epochs=2) for rows, name in named),
        *(Case(f"{peer}{name}", rows, 2, peer) for peer in (FULL, grouped) for rows, name in named),
    ]
    named = [(16, ", 16 rows"), (64, ", 64 rows")]
    classes = [
        ours("padded", 16, "Padded", 4096, epochs=2),
        *(ours(f"fixed{name}", rows, "Fixed", rows, epochs=2) for rows, name in named),
        *(Case(f"{peer}{name}", rows, 2, peer) for peer in (FULL, grouped) for rows, name in named),
    ]
    return {"2,000 documents": few, "two classes": classes}


_SLOW = ("webdataset buffer 1,000",)
"""Takes some 50 microseconds a row: minutes on rows by the million."""

CASES: dict[str, list[Case]] = {
    "documents by source": [
        *policies(27, 16_384, 2048, 2),
        *windows(27, "Padded", 16_384),
        *of_peers(27, 2),
    ],
    "documents by length": [*policies(27, 16_384, 2048, 1), *of_peers(27, 1)],
    "documents by date": [*policies(27, 16_384, 2048, 1), *of_peers(27, 1)],
    "short rows by source": [
        *policies(170, 4_096, 512, 1),
        *windows(170, "Padded", 4_096),
        *of_peers(170, 1, *_SLOW),
    ],
    **small_sets(),
}

MIXTURES = Mixtures(
    ("documents by source", "a small source"),
    (0.98, 0.02),
    (ours("padded", 27, "Padded", 16_384), ours("packed", 27, "Packed", 2048, 8)),
)

COSTS = {
    "documents by source": [
        *policies(27, 16_384, 2048, 1),
        *windows(27, "Padded", 16_384),
    ],
    "short rows by source": [*policies(170, 4_096, 512, 1), *windows(170, "Padded", 4_096)],
}
