"""Which characters do the engines classify differently? Run as a script, it prints them.

A tokenizer whose only merges are of any two bytes shows by its ids where a text was split. Every
character stands in every neighbourhood that a regex of the table of shapes can tell apart.
"""

import itertools
import json
import os
from collections.abc import Iterable, Iterator

import numpy as np
from tokenizers import Tokenizer

from tokenfeed.tools.encoding.fast.shapes import REGEXES, byte_letters

NEIGHBOURHOODS = "\n".join(
    (
        *(
            "a{}a",
            "A{}A",
            "A{}a",
            "a{}A",
            "1{}1",
            "!{}!",
            " {} ",
            "  {}  ",
            "\n{}\n",
            "'{}",
            "{}{}",
        ),
        *(
            "{}{}{}{}a",
            "a'{}a",
            "!{}a",
            " {}a",
            "1{}a",
            "a{}1",
            "{}'s",
            "\r\n{}/",
            "\u65e5{}\u672c",
        ),
        *("\u00e9{}\u00e9", "'{}e", "'{}l", "{} {}", "{}\n{}", "x{}{}{}1234", " {}{}", " {}1"),
        *("\t{}\t", "/{}/", "_{}_", "'L{}"),
    )
)
CHARACTERS = [*range(0xD800), *range(0xE000, 0x110000)]
_AT_ONCE = 4096


def probe_json(name: str) -> bytes:
    """A byte-level tokenizer with the regexes of a name in the table; "" is ByteLevel's own."""
    letters = byte_letters()
    pairs = sorted(itertools.product(range(256), repeat=2), key=_priority)
    merges = [[letters[left], letters[right]] for left, right in pairs]
    tokens = [*letters.values(), *("".join(merge) for merge in merges)]
    steps = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in REGEXES.get(name, ())
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    last |= {"use_regex": not steps}
    model = {"type": "BPE", "vocab": {token: id_ for id_, token in enumerate(tokens)}}
    content = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, last]} if steps else last,
        "model": model | {"merges": merges},
    }
    return json.dumps(content).encode()


def _priority(pair: tuple[int, int]) -> tuple[int, int, int]:
    """Merges across the bounds of characters first: there a split must show."""
    ascii_, continued, lead = 0, 1, 2
    left, right = (ascii_ if b < 0x80 else continued if b < 0xC0 else lead for b in pair)
    order = ((continued, ascii_), (continued, lead), (ascii_, lead), (ascii_, ascii_))
    place = order.index((left, right)) if (left, right) in order else len(order)
    return (place, *pair)


def differing_characters(name: str, characters: Iterable[int]) -> Iterator[int]:
    """Those of some characters for which the bare engines differ, in some neighbourhood."""
    import gigatoken

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    json_bytes = probe_json(name)
    reference = Tokenizer.from_buffer(json_bytes)
    fast = gigatoken.Tokenizer.from_json(json_bytes)
    left = iter(characters)
    while some := list(itertools.islice(left, _AT_ONCE)):
        texts = [NEIGHBOURHOODS.replace("{}", chr(character)) for character in some]
        right = reference.encode_batch_fast(texts, add_special_tokens=False)
        given = fast.encode_batch([text.encode() for text in texts], parallel=False).layout
        rows = np.split(given.content.data, given.offsets.data[1:-1])
        for character, encoding, row in zip(some, right, rows, strict=True):
            if not np.array_equal(encoding.ids, row):
                yield character


if __name__ == "__main__":
    for regexes in ("", *REGEXES):
        found = list(differing_characters(regexes, CHARACTERS))
        print(f"{regexes or 'ByteLevel'}: {len(found):,}")
        starts = [character for character in found if character - 1 not in found]
        ends = [character for character in found if character + 1 not in found]
        print(*(f"({first:#06x}, {last:#06x})," for first, last in zip(starts, ends, strict=True)))
