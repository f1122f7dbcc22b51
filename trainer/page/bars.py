"""How long rows are, as bars."""

from collections.abc import Sequence

from tokenfeed.trainer.page.scale import Scale, short

__all__ = ["draw_bars"]

_WIDTH, _ROW, _LEFT, _RIGHT = 720, 26, 130, 640


def draw_bars(rows_by_length: Sequence[int]) -> str:
    """A figure of rows by length in tokens; entry k counts those of 2**k up to 2**(k+1) - 1."""
    known = [power for power, rows in enumerate(rows_by_length) if rows]
    if not known:
        return ""
    shown = range(known[0], known[-1] + 1)
    x = Scale(0, max(rows_by_length), _LEFT, _RIGHT)
    bars = "".join(
        _bar(number * _ROW, power, rows_by_length[power], x) for number, power in enumerate(shown)
    )
    title = "Rows by length"
    return (
        f'<figure tabindex="0"><figcaption><h3>{title}</h3></figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_ROW * len(shown)}" role="img" aria-label="{title}">{bars}'
        "</svg><p>Of the training split, in tokens. The wider this is, the more a batch of any "
        "rows would pad: rows of like length are put together, or packed.</p></figure>"
    )


def _bar(top: int, power: int, rows: int, x: Scale) -> str:
    low, high = 1 << power, (2 << power) - 1
    name = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    width, middle = x(rows) - _LEFT, top + _ROW - 8
    return (
        f'<text class="tick" x="{_LEFT - 8}" y="{middle}" text-anchor="end">{name}</text>'
        f'<rect class="area c0" x="{_LEFT}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}"/>'
        f'<text class="tick" x="{_LEFT + width + 6:.1f}" y="{middle}">{short(rows)}</text>'
    )
