"""How long rows are, drawn in characters."""

from collections.abc import Iterator, Sequence

from tokenfeed.pipeline.arithmetic import ceil_div

__all__ = ["histogram_lines"]

_BAR_WIDTH = 40


def histogram_lines(counts: Sequence[int]) -> Iterator[str]:
    """A line for each power of two from the shortest rows to the longest.

    Args:
        counts: As `SplitInfo.length_histogram`.
    """
    filled = [exponent for exponent, count in enumerate(counts) if count]
    if not filled:
        return
    for exponent in range(filled[0], filled[-1] + 1):
        bar = "█" * ceil_div(counts[exponent] * _BAR_WIDTH, max(counts))
        label = f"{2**exponent:,} to {2 ** (exponent + 1) - 1:,}"
        yield f"{label:>25} {bar:<{_BAR_WIDTH}} {counts[exponent]:,}"
