"""JSON Lines: blocks at once give what a line at a time by the standard library gives."""

import codecs
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenfeed.tools.corpus.formats.json_records import JsonLines, is_json_lines, is_json_list
from tokenfeed.tools.corpus.records import FieldKind, Fields, Records

FIELDS: list[Fields] = [
    {"text": FieldKind.TEXT},
    {"text": FieldKind.TEXT, "label": FieldKind.LABEL},
    {"words": FieldKind.WORDS, "labels": FieldKind.LABELS},
    {"text": FieldKind.TEXT, "score": FieldKind.NUMBER},
    {
        "label": FieldKind.LABEL,
        "words": FieldKind.WORDS,
        "text": FieldKind.TEXT,
        "labels": FieldKind.LABELS,
    },
]

SOUND_STRINGS = st.one_of(
    st.text(max_size=6).map(json.dumps),
    st.text(max_size=6).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from([r'"\ud83c\udf89"', r'"\/\b\u0041"', '"a}{b"', '"{}"', '"\x7f\u2028"']),
)
STRINGS = SOUND_STRINGS | st.sampled_from(
    [r'"\ud800"', r'"\udc00\ud800"', r'"\x"', r'"\u12g4"', '"raw\ttab"', '"nul\0"', '"cut', "'a'"]
)
NUMBERS = st.one_of(
    st.integers().map(str),
    st.sampled_from(["1.0", "-0", "-0.0", "1e2", "1e999", "1" * 400, "18446744073709551616"]),
    st.sampled_from(["NaN", "Infinity", "-Infinity", "01", "1.", ".5", "+1", "-", "1e", "0x1"]),
)
WILD = st.recursive(
    STRINGS | NUMBERS | st.sampled_from(["true", "false", "null", "tru", ""]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.tuples(STRINGS, inner).map(lambda pair: "{" + ": ".join(pair) + "}"),
    ),
    max_leaves=4,
)
SOUND_LABELS = SOUND_STRINGS | st.integers(0).map(str) | st.sampled_from(["true", "false", "-0"])
SOUND = {
    "text": SOUND_STRINGS,
    "score": st.floats(width=32).map(str) | NUMBERS | st.sampled_from(['"2.5"', '" 1"', '"1e39"']),
    "label": SOUND_LABELS,
    "words": st.lists(SOUND_STRINGS, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
    "labels": st.lists(SOUND_LABELS, max_size=3).map(lambda items: f"[{','.join(items)}]"),
}
KEYS = st.sampled_from(
    ['"text"', '"label"', '"other"', r'"\u0074ext"', '"score"', '"text "', '""', '"}\\n{"']
)
NEWLINES = st.sampled_from(["\n"] * 6 + ["\r\n", "\n\n", " \n", "\n \n", "", " ", "\f\n", "\r"])
LINES = st.sampled_from(["", "{}", "[]", "null", "{", "}", "}{", "[1]", "5", '"x"', "\ufeff", "//"])
BYTES = st.sampled_from([b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xc3"])


@st.composite
def objects(draw: st.DrawFn, wild: bool) -> str:
    """An object that has every field; a wild one may lack one or have wrong or doubled ones."""
    members = [f'"{name}":{draw(values)}' for name, values in SOUND.items()]
    members.append(f'"other": {draw(SOUND_STRINGS | st.integers().map(str))}')
    if wild:
        members += draw(st.lists(st.tuples(KEYS, WILD).map(": ".join), max_size=2))
        members = draw(st.permutations(members))[draw(st.sampled_from([0, 0, 0, 1])) :]
    separator = draw(st.sampled_from([",", ",", " , ", ",\n", "\n,"] if wild else [",", " , "]))
    return "{" + separator.join(members) + "}"


@st.composite
def blocks(draw: st.DrawFn) -> bytes:
    """Lines of one object each, in some blocks with everything that can go wrong."""
    lines, newlines = objects(False), st.just("\n")
    match draw(st.integers(0, 3)):
        case 1:
            lines |= objects(True)
        case 2:
            lines, newlines = lines | LINES, NEWLINES
        case 3:
            lines, newlines = lines | objects(True) | LINES, NEWLINES
    pieces = draw(st.lists(st.tuples(lines, newlines), max_size=6))
    block = draw(st.sampled_from(["", "", "\ufeff"])) + "".join(map("".join, pieces))
    data = bytearray(block.encode())
    for bad in draw(st.sampled_from([0, 0, 0, 1])) * [draw(BYTES)]:
        data.insert(place := draw(st.integers(0, len(data))), 0)
        data[place : place + 1] = bad
    return bytes(data)


def as_tuple(records: Records) -> tuple[list[int], dict[str, list[Any]], list[tuple[int, str]]]:
    return (
        records.numbers.tolist(),
        records.fields,
        [(record, reason) for record, reason in records.rejects],
    )


def check_equals_careful(block: bytes, fields: Fields, first_record: int) -> None:
    """What `decode` gives is what `json` gives, line by line, and so is the count of lines."""
    decoder = JsonLines(fields)
    records, num_lines = decoder.decode(block, first_record)
    told = block if first_record else block.removeprefix(codecs.BOM_UTF8)
    assert as_tuple(records) == as_tuple(decoder.decode_any(told, first_record))
    if block.endswith(b"\n"):
        assert num_lines == block.count(b"\n")


GOOD = [
    '{"text": "a", "score": 2.5, "words": ["b"], "label": 1, "labels": ["x", 2, true], "o": [{}]}',
    '{"labels": [], "o": [{}, {}], "label": "z", "words": [], "score": 3, "text": "{} é \\"}\\n{"}',
    '{"label": false, "text": "", "text": "last", "score": "-1e9", "words": [""], "labels": [0]}',
]


@given(
    lines=st.lists(st.sampled_from(GOOD), min_size=1, max_size=5),
    fields=st.sampled_from(FIELDS),
    last=st.sampled_from(["\n", ""]),
)
def test_sound_lines_take_the_fast_path(lines: list[str], fields: Fields, last: str) -> None:
    block = ("\n".join(lines) + last).encode()
    records = JsonLines(fields).decode_sound(block, 5)
    assert records is not None, "the other tests prove nothing"
    assert records.numbers.tolist() == list(range(5, 5 + len(lines)))
    check_equals_careful(block, fields, 5)


PATCH = st.binary(max_size=2) | st.sampled_from([b"\n", b"}{", b"}\n{", b"}", b"{", b'"'])


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Sound lines with bytes replaced."""
    lines = draw(st.lists(st.sampled_from(GOOD), min_size=1, max_size=3))
    block = bytearray(("\n".join(lines) + "\n").encode())
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, 400))
        block[place : place + draw(st.integers(0, 3))] = draw(PATCH)
    return bytes(block)


A, B = '{"text": "a"}', '{"text": "b", "x": {}}'
PIECES = [A, B, "\n", "\n", A + B, '{"text":\n"c"}', '{"x": {}\n,"text": "d"}']
TEXT: Fields = {"text": FieldKind.TEXT}


@pytest.mark.slow
@settings(max_examples=2 * settings().max_examples)
@given(
    block=blocks() | damaged() | st.lists(st.sampled_from(PIECES)).map("".join).map(str.encode),
    fields=st.sampled_from([TEXT, *FIELDS]),
    first_record=st.sampled_from([0, 0, 7]),
)
@example(f"{A}{B}\n\n".encode(), TEXT, 0)  # the counts of lines and objects cancel out
@example(f'{A}{B}\n{{"x": {{}}\n,"text": "d"}}\n'.encode(), TEXT, 0)
@example(f"\n{A}{B}".encode(), TEXT, 0)
@example(b'{"text": "a", "x": %s}\n' % (b"1" * 400), TEXT, 0)
def test_any_block_gives_what_the_careful_path_and_each_line_give(
    block: bytes, fields: Fields, first_record: int
) -> None:
    check_equals_careful(block, fields, first_record)
    check_is_what_each_line_gives_alone(block, fields)


HUGE = ["9" * 20, "9" * 400, "9" * 4301, "-" + "1" * 9000, "1e999", "1" * 5000 + "e5", "NaN"]
DEEP = ["[" * depth + "]" * depth for depth in (900, 990, 993, 996, 999, 1100)]


@given(
    values=st.lists(st.sampled_from([*HUGE, *DEEP, "1", '"x"', "null"]), min_size=1, max_size=5),
    bad=st.sampled_from(["", "{", "[1]", '{"text": 5}', '{"text": "\\ud800"}']),
    fields=st.sampled_from(FIELDS[:2]),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_the_fate_of_a_line_does_not_depend_on_its_neighbours(
    values: list[str], bad: str, fields: Fields, newline: str
) -> None:
    lines = [f'{{"text": "a", "label": 1, "label": {value}, "x": {value}}}' for value in values]
    check_is_what_each_line_gives_alone(newline.join([*lines, bad, lines[0], ""]).encode(), fields)
    lines = [f'{{"text": "a", "label": 1, "x": {value}}}' for value in values]
    check_is_what_each_line_gives_alone(newline.join([*lines, bad, lines[0], ""]).encode(), fields)


def check_is_what_each_line_gives_alone(block: bytes, fields: Fields) -> None:
    decoder = JsonLines(fields)
    numbers, values, rejects = as_tuple(decoder.decode(block, 0)[0])
    alone = [
        as_tuple(decoder.decode(line, number)[0]) for number, line in enumerate(block.split(b"\n"))
    ]
    assert numbers == [number for found, _, _ in alone for number in found]
    assert rejects == [reject for _, _, found in alone for reject in found]
    for name in fields:
        assert values[name] == [value for _, found, _ in alone for value in found[name]]


@pytest.mark.parametrize("name", ["", "é", "te xt", 'a"b', "a\\b", "a\nb", "field1"])
def test_a_field_may_have_any_name(name: str) -> None:
    block = json.dumps({name: "value", "field0": 1}).encode() + b"\n"
    records, _ = JsonLines({name: FieldKind.TEXT}).decode(block, 0)
    assert records.fields == {name: [b"value"]}


@pytest.mark.parametrize(
    ("start", "lines", "a_list"),
    [
        (b'{"text": "a"}\n{"te', True, False),
        (b'\xef\xbb\xbf\r\n {"text": 1}\r\n', True, False),
        (b'{"text": "a"}', True, False),
        (b'{"body": "a"}\n', False, False),
        (b'{"body": "a"}\r\n\r\n', False, False),
        (b'{"body": "a"}\n{"te', True, False),
        (b'{"body": "a"}\n\n\n{"te', True, False),
        (b'{"body": "a"\n{"text": "b"}\n', True, False),
        (b'{\n"text": "a"\n}\n', False, False),
        (b"", False, False),
        (b'\xef\xbb\xbf [\n {"text": "a",\n "b": 2}, {"te', False, True),
        (b'[{"text": "a"}]\n', False, True),
        (b'[{"body": "a"}]', False, True),
        (b'[\n{"body": "a"}\n]', False, True),
        (b'["text"]', False, False),
        (b"[]", False, False),
        (b"[" * 5000, False, False),
        (b'{"text": "\xff"}', False, False),
        (b"plain words", False, False),
    ],
)
def test_what_a_file_holds_is_seen_from_its_start(start: bytes, lines: bool, a_list: bool) -> None:
    assert (is_json_lines(start, "text"), is_json_list(start, "text")) == (lines, a_list)
