"""Mutations of bytes and of JSON: what damage, old programs and attackers make of a file."""

import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple


class Layer(NamedTuple):
    """The content below the checksums or the compression of a file."""

    content: Callable[[bytes], Any]
    """Returns the content: bytes, or values of JSON."""
    seal: Callable[[Any], bytes]
    """Encodes a content with its checksums, as an attacker does."""


_INTEGERS = (
    *(0, 1, 2, 7, 127, 128, 255, 256, 65535, 65536, 10**7, 10**9, 10**12, 10**18),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400),
)
_BAD_UTF8 = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\0", b"\xef\xbb\xbf")
_OTHER_FILES = (
    *(b"", b"\n", b"{}", b"[]", b"null", b"0", b'""', b"ARROW1\0\0", b"PAR1", b"\x1f\x8b\x08"),
)
_WORDS = (
    *("", "a", "\0", "\ud800", "../../x", "/dev/zero", "nan", "é" * 300, "x" * 70_000, "[" * 999),
)
_PAIR = re.compile(r'"(?:[^"\\]|\\.)*":\s*[^,{}\[\]]+')


def mutated(draw: random.Random, data: bytes, layer: Layer | None = None) -> bytes:
    """Return `data` with one to three mutations.

    Args:
        draw: Decides everything.
        data: A valid file.
        layer: Half of the mutations change the content of this layer and seal it again.
    """
    if layer and draw.random() < 0.5:
        content = layer.content(data)
        is_bytes = isinstance(content, bytes)
        for _ in range(draw.choice((1, 1, 2))):
            content = (draw.choice(_CHANGES) if is_bytes else _changed_json)(draw, content)
        try:
            return layer.seal(content)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ):
            return json.dumps(content).encode("utf-8", "replace")
    if data[:1] in b"{[" and data and draw.random() < 0.4:
        try:
            content = _changed_json(draw, json.loads(data))
            return _changed_text(draw, json.dumps(content))
        except (ValueError, RecursionError):
            pass
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        data = draw.choice(_CHANGES)(draw, data)
    return data


def _changed_text(draw: random.Random, text: str) -> bytes:
    """Write a key twice now and then: parsers differ in which of the values counts."""
    pairs = _PAIR.findall(text) if draw.random() < 0.3 else []
    if pairs:
        pair = draw.choice(pairs)
        text = text.replace(pair, f"{pair}, {pair.partition(':')[0]}: {json.dumps(_odd(draw))}", 1)
    return text.encode("utf-8", "surrogatepass")


def _odd(draw: random.Random) -> Any:
    """Return a value of another type, or an extreme one."""
    kind = draw.randrange(8)
    if kind < 3:
        return draw.choice(_INTEGERS) * draw.choice((1, 1, -1))
    if kind == 3:
        return draw.choice((0.5, -0.0, 1e300, float("nan"), float("inf")))
    if kind == 4:
        return draw.choice(_WORDS)
    if kind == 5:
        return draw.choice((None, True, False))
    if kind == 6:
        return [_odd(draw) for _ in range(draw.choice((0, 1, 3)))]
    nested: Any = {}
    for _ in range(draw.choice((1, 5, 90))):
        nested = draw.choice(({"a": nested}, [nested]))
    return nested


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        found.append((value, key))
        if isinstance(inner, dict | list):
            _places(inner, found)
    return found


def _changed_json(draw: random.Random, content: Any) -> Any:
    places = _places(content, []) if isinstance(content, dict | list) else []
    if not places or draw.random() < 0.02:
        return _odd(draw)
    holder, key = draw.choice(places)
    kind = draw.randrange(8)
    value = holder[key]
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, its = draw.choice(places)
        holder[key] = json.loads(json.dumps(other[its]))
    elif kind == 2 and isinstance(value, int) and not isinstance(value, bool):
        holder[key] = draw.choice(
            (value + 1, value - 1, -value, value * 2, f"{value % 10**30}", value % 10**30 + 0.5)
        )
    elif kind == 3 and isinstance(value, list):
        holder[key] = value * draw.choice((0, 2, 3)) or value[1:]
    elif kind == 4 and isinstance(value, str):
        at = draw.randint(0, len(value))
        holder[key] = value[:at] + draw.choice(_WORDS) + value[at + draw.choice((0, 1)) :]
    elif kind == 5 and isinstance(holder, dict):
        holder[draw.choice(_WORDS)] = _odd(draw)
    else:
        holder[key] = _odd(draw)
    return content


def _span(draw: random.Random, data: bytes) -> tuple[int, int]:
    begin = draw.randint(0, len(data))
    return begin, min(len(data), begin + draw.choice((1, 2, 4, 8, 64, 4096)))


def _truncated(draw: random.Random, data: bytes) -> bytes:
    cut = draw.choice((draw.randint(0, len(data)), len(data) - draw.randint(1, 16)))
    return data[: max(0, cut)]


def _flipped(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(draw.choice((1, 1, 2, 9))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _other_number(draw: random.Random, data: bytes) -> bytes:
    """Overwrite a little-endian integer, mostly an aligned one near the begin or the end."""
    width = draw.choice((1, 2, 4, 8))
    if len(data) < width:
        return data
    last = len(data) - width
    near = draw.choice((last, min(last, 256), min(last, 2048)))
    at = draw.choice((draw.randint(0, near), last - draw.randint(0, near)))
    at -= at % width if draw.random() < 0.8 else 0
    now = int.from_bytes(data[at : at + width], "little")
    value = draw.choice((*_INTEGERS, now + 1, now - 1, now * 2, len(data), len(data) + 1, -1))
    return data[:at] + struct.pack("<Q", value % 2**64)[:width] + data[at + width :]


def _other_part(draw: random.Random, data: bytes) -> bytes:
    """Remove, repeat or overwrite a part."""
    begin, end = _span(draw, data)
    part, size = data[begin:end], end - begin
    parts = (b"", b"", part * 2, part * 3, part * 51, bytes(size), b"\xff" * size)
    return data[:begin] + draw.choice(parts) + data[end:]


def _swapped(draw: random.Random, data: bytes) -> bytes:
    (a, b), (c, d) = sorted((_span(draw, data), _span(draw, data)))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:] if b <= c else data[::-1]


def _inserted(draw: random.Random, data: bytes) -> bytes:
    at = draw.randint(0, len(data))
    junk = draw.choice((*_BAD_UTF8, b"\n", b'"', b",", b"{", b"[", b"\\", draw.randbytes(40)))
    return data[:at] + junk * draw.choice((1, 1, 3)) + data[at:]


def _other_digits(draw: random.Random, data: bytes) -> bytes:
    found = list(re.finditer(rb"-?\d+", data[: 1 << 16]))
    if not found:
        return _flipped(draw, data)
    number = draw.choice(found)
    text = str(draw.choice(_INTEGERS)).encode()
    if draw.random() < 0.05:
        text = b"9" * 100_000
    return data[: number.start()] + text + data[number.end() :]


def _nested(draw: random.Random, data: bytes) -> bytes:
    opening = draw.choice((b"[", b'{"a":'))
    at = draw.choice((0, draw.randint(0, len(data))))
    return data[:at] + opening * draw.choice((100_000, 900, 900, 900)) + data[at:]


def _replaced(draw: random.Random, data: bytes) -> bytes:
    other = draw.choice((*_OTHER_FILES, draw.randbytes(200)))
    return other + (data if draw.random() < 0.3 else b"")


_CHANGES = (
    *(_truncated, _flipped, _flipped, _other_number, _other_number, _other_number, _swapped),
    *(_other_part, _other_part, _other_part, _inserted, _other_digits, _nested, _replaced),
)
