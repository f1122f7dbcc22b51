"""The parts of a rendered conversation: whose text it is, and where the assistant speaks.

Contents of messages are found by a second rendering with marks, characters for private use, around
each content. If its text without the marks equals the text rendered without them, the marks are
right. Otherwise the template changes its output by the contents, and the parts of other roles stay
unknown.

All else is searched in the text without the contents, which are blanked: an answer, a user's
question or an argument of a call may contain the text of a special token or of the generation
prompt.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.format.kinds import BEGINS, Kind
from tokenfeed.tools.corpus.records import Unusable
from tokenfeed.tools.encoding.chat_messages import Conversation, Message, replaced, replaced_tools
from tokenfeed.tools.encoding.jinja_sandbox import FIRST_MARK, MARK, MARKS, MarkedObject

BLANK = "\0"
"""Stands for each character of a content. It is no white space, and in no special token."""
_END_OF_THOUGHT = re.compile(r".*</think>\s*", re.DOTALL)

Range = tuple[int, int]
"""First character and last character + 1."""


class Part(NamedTuple):
    """A content of a message in the rendered text."""

    start: int
    end: int
    message: int
    """The number of the message; -1 for tools, ids and texts in arguments."""
    kind: Kind
    content: int
    """The number of the content."""


class Marks(NamedTuple):
    """A conversation with marks around its contents."""

    conversation: Conversation
    contents: list[tuple[int, Kind]]
    """The message and the kind of each content."""
    objects: dict[int, MarkedObject]
    """The contents that are objects, by number."""

    def parts(self, rendered: str, text: str, *, whole: bool) -> tuple[list[Part], str] | None:
        """Return the contents in a text, and what follows it in the text with marks.

        Returns None if the text with marks begins otherwise, if marks came apart, or if more
        follows the `whole` text.
        """
        pieces = MARK.split(rendered)
        unmarked = "".join(pieces)
        if unmarked != text and (whole or not unmarked.startswith(text)):
            return None
        marks = [ord(mark) - FIRST_MARK for mark in MARK.findall(rendered)]
        parts, at = [], len(pieces[0])
        for nth in range(0, len(marks), 2):
            opening, closing = marks[nth], marks[nth + 1] if nth + 1 < len(marks) else -1
            end = at + len(pieces[nth + 1])
            if opening % 2 or closing != opening + 1 or end > len(text):
                return None
            is_leaf = opening == MARKS
            about = (-1, Kind.TEMPLATE) if is_leaf else self.contents[opening // 2]
            parts.append(Part(at, end, *about, opening // 2))
            at = end + len(pieces[nth + 2])
        return parts, unmarked[len(text) :]


def marked(conversation: Conversation, slots: frozenset[str], *, inside: bool) -> Marks | None:
    """Return a conversation with marks; None if it has more contents than there are marks.

    Args:
        conversation: The conversation.
        slots: What is a content, beside texts; see `SLOTS`.
        inside: Whether marks stand inside the outer white space of a content.
    """
    contents: list[tuple[int, Kind]] = []
    objects: dict[int, MarkedObject] = {}
    ids: dict[str, str] = {}

    def mark(value: Any, message: int, kind: Kind) -> Any:
        is_text = isinstance(value, str)
        if is_text and message < 0 and value in ids:
            return ids[value]
        begin, end = 0, len(value)
        if inside and is_text:
            begin, end = len(value) - len(value.lstrip()), len(value.rstrip())
        if begin >= end:
            return value
        code = FIRST_MARK + min(2 * len(contents), MARKS - 2)
        opening, closing = chr(code), chr(code + 1)
        contents.append((message, kind))
        if not is_text:
            marks, is_tool = (opening, closing), message < 0
            objects[len(contents) - 1] = made = MarkedObject(value, marks, has_leaves=not is_tool)
            return made
        text = f"{value[:begin]}{opening}{value[begin:end]}{closing}{value[end:]}"
        if message < 0:
            ids[value] = text
        return text

    tools = replaced_tools(conversation.tools, mark, slots)
    messages = [replaced(m, n, mark, slots) for n, m in enumerate(conversation.messages)]
    if 2 * len(contents) > MARKS:
        return None
    return Marks(Conversation(messages, tools, conversation.arguments), contents, objects)


def blanked(text: str, parts: list[Part]) -> str:
    """Return a text of the same length in which contents are blank."""
    pieces, at = [], 0
    for part in parts:
        pieces += [text[at : part.start], BLANK * (part.end - part.start)]
        at = part.end
    return "".join([*pieces, text[at:]])


def any_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of any of some tokens, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


@dataclass(frozen=True, slots=True, eq=False)
class TemplateLayout:
    """The meaning of each piece of a rendered conversation. Conversations may share a layout."""

    pieces: tuple[bytes | int, ...]
    """Texts of the template in UTF-8, and numbers of contents."""
    starts: np.ndarray
    """The piece with which each stretch of one kind begins, ascending from 0, shape (K,)."""
    kinds: np.ndarray
    """The kind of each stretch, shape (K,), uint8."""
    messages: np.ndarray
    """First piece and last piece + 1 of what belongs to each message, shape (M, 2)."""
    spans: np.ndarray
    """First piece and last piece + 1 of all that belongs to a message, ascending, shape (S, 2)."""
    owners: tuple[int, ...]
    """The number of the message of each span, from 0; -1 if it is not certain."""
    counts: tuple[int, ...]
    """What users should know, by `COUNTS`."""
    are_contents: np.ndarray
    """Whether each piece is a known content, or a part of one, shape (P,), bool."""


COUNTS = ("no_stop", "unmarked", "unproved", "removed_thinking", "removed_text")
"""Names of the counts of a layout; see `docs/format.md`."""


_NO_PIECES = np.empty((0, 2), np.int64)
EMPTY = TemplateLayout(
    *((), np.zeros(1, np.int64), np.zeros(1, np.uint8), _NO_PIECES, _NO_PIECES, (), (0,) * 5),
    np.zeros(0, np.bool_),
)
"""The layout of an empty text."""


class Rendered(NamedTuple):
    """A rendered conversation."""

    layout: TemplateLayout
    pieces: list[bytes]
    """The text in UTF-8."""


class TokensOfPieces:
    """The tokens of R rendered conversations, and the pieces in which they begin."""

    def __init__(self, rendered: list[Rendered], starts: np.ndarray, ends: np.ndarray) -> None:
        """Find the byte at which each piece begins.

        Args:
            rendered: The conversations.
            starts: Where each token begins, in bytes over all conversations, shape (N,).
            ends: Where each token ends, shape (N,).
        """
        self._layouts = [each.layout for each in rendered]
        self._starts, self._ends = starts, ends
        sizes = [len(piece) for each in rendered for piece in each.pieces]
        self._places = offsets_of(np.array(sizes, np.int64))
        self._first_piece = offsets_of(np.array([len(each.pieces) for each in rendered], np.int64))

    def _bytes_of(self, pieces: list[np.ndarray]) -> np.ndarray:
        """Return the byte at which pieces begin, given their numbers in each conversation."""
        firsts = np.repeat(self._first_piece[:-1], [len(each) for each in pieces])
        numbers = np.concatenate(pieces)
        places: np.ndarray = self._places[numbers + firsts.reshape(-1, *(1,) * (numbers.ndim - 1))]
        return places

    def kinds(self, lengths: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the kinds column, and counts of each conversation.

        A token has the kind of its first character. Tokens that end in characters of another kind
        are counted.

        Args:
            lengths: Tokens of each conversation, shape (R,).
        """
        starts, num_rows = self._starts, len(self._layouts)
        begins = self._bytes_of([each.starts for each in self._layouts])
        values = np.concatenate([each.kinds for each in self._layouts])
        first_token = np.searchsorted(starts, begins)
        kinds = np.repeat(values, np.diff(np.append(first_token, len(starts))))
        rows = np.repeat(np.arange(num_rows), lengths)
        per_row = np.bincount(rows * 8 + kinds, minlength=8 * num_rows).reshape(-1, 8)
        counts = {kind.label + "_tokens": per_row[:, kind] for kind in Kind}
        before = np.maximum(first_token - 1, 0)
        is_split = (first_token > 0) & (self._ends[before] > begins) if len(starts) else before < 0
        last = kinds.copy()
        last[before[is_split]] = values[is_split]  # of several in one token, the last counts
        counts["split_tokens"] = np.bincount(rows[last != kinds], minlength=num_rows)
        found = np.array([each.counts for each in self._layouts], np.int64)
        counts |= dict(zip(COUNTS, found.T, strict=True))
        first, stop = self._bytes_of([each.messages for each in self._layouts]).T
        tokens = np.searchsorted(starts, first)
        tokens, stop = tokens[tokens < len(starts)], stop[tokens < len(starts)]
        kinds[tokens[starts[tokens] < stop]] |= BEGINS
        return kinds, counts

    def overlapping(
        self, ids: np.ndarray, special: dict[int, str], unknown: str | None, text: bytes
    ) -> dict[int, str]:
        """Return the numbers of special tokens that have characters of a content, and their texts.

        A token may take the white space around its text, which does not count. The unknown token
        counts only where the text has its name, because the model uses it for other texts.

        Args:
            ids: The ids of all conversations, shape (N,).
            special: The special tokens by id.
            unknown: The unknown token; None without one.
            text: The text of all conversations.
        """
        tokens = np.flatnonzero(np.isin(ids, [*special]))
        contents = np.concatenate([each.are_contents for each in self._layouts])
        before = offsets_of(contents.astype(np.int64))

        def overlap(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
            first = np.searchsorted(self._places, starts, "right") - 1
            found: np.ndarray = before[np.searchsorted(self._places, ends)] > before[first]
            return found

        found = {}
        for token in tokens[overlap(self._starts[tokens], self._ends[tokens])].tolist():
            start, end = self._starts[token], self._ends[token]
            word, name = text[start:end].decode(), special[int(ids[token])]
            if name not in word:  # the normalizer changed it
                name = "" if name == unknown else word.strip()
            if not name.strip():
                continue
            lead, _, rest = word.partition(name)
            start, end = start + len(lead.encode()), end - len(rest.encode())
            if overlap(np.array([start]), np.array([end]))[0]:
                found[token] = name
        return found

    def numbers(self, of_messages: list[list[float]]) -> np.ndarray:
        """Return for each token the number of the message that its first character belongs to.

        The number of the template's tokens is 0.

        Args:
            of_messages: The numbers of the messages of each conversation; empty for an empty text.
        """
        found = np.zeros(len(self._starts))
        edges = self._bytes_of([each.spans for each in self._layouts])
        tokens = iter(np.searchsorted(self._starts, edges).tolist())
        for layout, numbers in zip(self._layouts, of_messages, strict=True):
            for owner, (first, stop) in zip(layout.owners, tokens, strict=False):
                found[first:stop] = numbers[owner]
        return found


def said_by_prompt(
    blank: str,
    prompt: str,
    parts: list[Part],
    messages: list[Message],
    special_tokens: tuple[str, ...],
    eos: str | None,
) -> list[Range] | None:
    """Find what the assistant says between the generation prompt and a special token.

    Return None unless every prompt in the text belongs to one message of the assistant, in their
    order. Templates of models that think end the prompt with `<think>`, and may write it only
    before the last message. So if there are too few prompts, the text before counts.

    Args:
        blank: The text with blank contents.
        prompt: What the template adds for `add_generation_prompt`.
        parts: The contents.
        messages: The messages of the conversation.
        special_tokens: The special tokens. A token of the prompt ends no message.
        eos: The special token that ends a message even if another is before it. The token at the
            end of the text does the same.
    """
    stops = any_of(tuple(token for token in special_tokens if token not in prompt))
    for head in dict.fromkeys((prompt, prompt.partition("<think>")[0])):
        if head and (said := _said_after(head, blank, prompt, parts, messages, stops, eos)):
            return said
    return None


def _said_after(
    head: str,
    blank: str,
    prompt: str,
    parts: list[Part],
    messages: list[Message],
    stops: re.Pattern[str],
    eos: str | None,
) -> list[Range] | None:
    """Find messages after the beginning of the prompt, or all of it."""
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    own = [part for part in _first_said(parts) if part.message >= 0]
    heads, whole = _ends(head, blank), {*_ends(prompt, blank)}
    if len(heads) != len(turns):
        return None
    last_stops = [m[0] for m in stops.finditer(blank) if not blank[m.end() :].strip()]
    limits = [*(place - len(head) for place in heads[1:]), len(blank)]
    rest = len(prompt) - len(head)
    said, at = [], 0
    for turn, place, limit in zip(turns, heads, limits, strict=False):
        last = begin = place + rest if place + rest in whole else place
        until = limit
        while at < len(own) and own[at].start < limit:
            part = own[at]
            if part.start < begin:
                if messages[part.message]["role"] == "assistant":
                    return None
            elif part.message == turn:
                last = part.end
            elif part.message < turn:
                return None
            else:
                until = part.start
                break
            at += 1
        ends = [*stops.finditer(blank, last, until)]
        if not ends and until < len(blank):
            return None
        # Calls may end with special tokens of their own, before the one that ends each message.
        likely = (m.end() for token in (eos, *last_stops) for m in ends if m[0] == token)
        stop = next(likely, 0)
        said.append((begin, stop or (ends[0].end() if ends else len(blank))))
    of_assistant = (part for part in own if messages[part.message]["role"] == "assistant")
    if not all(any(s <= part.start < e for s, e in said) for part in of_assistant):
        return None
    return said


def _first_said(parts: list[Part]) -> list[Part]:
    """Return contents without what a template repeats of the assistant, such as the name of a
    function in the header of the tool's answer."""
    firsts = {part.content: part for part in reversed(parts)}
    return [part for part in parts if part.kind < Kind.TEXT or firsts[part.content] is part]


def _ends(prompt: str, text: str) -> list[int]:
    """Return where each prompt in a text ends. A pattern of a long prompt would take seconds."""
    lengths = [len(piece) for piece in text.split(prompt)]
    return [at + len(prompt) * nth for nth, at in enumerate(accumulate(lengths[:-1]), 1)]


def laid_out(
    text: str,
    said: list[Range],
    parts: list[Part],
    contents: list[Part],
    turns: list[int],
    missing: tuple[int, ...],
    special: re.Pattern[str],
    unlearnt: frozenset[int] = frozenset(),
) -> Rendered:
    """Return a text with its layout.

    Args:
        text: The rendered conversation.
        said: What the assistant says.
        parts: The contents in the text.
        contents: The same, or fewer, which other conversations may have otherwise.
        turns: The numbers of the messages of the assistant.
        missing: The counts that are known, after `no_stop` and `unmarked`.
        special: Matches a special token.
        unlearnt: The messages of the assistant that no loss counts. They get the kind `template`.

    Raises:
        Unusable: It is not certain where these are.
    """
    blank = blanked(text, parts)
    own = [part for part in _first_said(parts) if part.kind is not Kind.TEMPLATE]
    spans: list[Range] = []
    owners: list[int] = []
    if len(turns) != len(said):
        if unlearnt:
            raise Unusable("it is not certain which message has the weight 0")
        turns = [-1] * len(said)
    starts, kinds, messages = [0], [int(Kind.TEMPLATE)], []
    no_stop = unmarked = at = 0

    def begin(start: int, kind: Kind) -> None:
        if start == starts[-1]:
            kinds[-1] = int(kind)
        elif kinds[-1] != kind:
            starts.append(start)
            kinds.append(int(kind))

    def others(until: int) -> Iterator[Part]:
        nonlocal at
        while at < len(own) and own[at].start < until:
            at += 1
            yield own[at - 1]

    shown = -1
    for turn, (start, end) in zip([*turns, -1], [*said, (len(text), len(text))], strict=True):
        for part in others(start):
            if part.kind >= Kind.TEXT:
                unmarked += 1
                continue
            begin(part.start, part.kind)
            begin(part.end, Kind.TEMPLATE)
            spans.append((part.start, part.end))
            owners.append(part.message)
            if part.message != shown:
                messages.append((part.start, part.end))
            shown = part.message
        if start == end:
            continue
        of_message = [*others(end)]
        if turn not in unlearnt:
            no_stop += not _begin_kinds(blank, of_message, (start, end), special, begin)
            begin(end, Kind.TEMPLATE)
        messages.append((start, end))
        spans.append((start, end))
        owners.append(turn)
    edges = {0, len(text), *starts, *chain(*messages), *chain(*spans)}
    edges |= {edge for part in (*parts, *contents) for edge in part[:2]}
    places = sorted(edges)
    number = {place: nth for nth, place in enumerate(places)}
    whole = (part for part in contents if number[part.end] == number[part.start] + 1)
    content_at = {number[part.start]: part.content for part in whole}
    pieces = [text[start:end].encode() for start, end in pairwise(places)]

    are_contents = np.zeros(len(pieces), np.bool_)
    for part in parts:
        are_contents[number[part.start] : number[part.end]] = True

    def pieces_at(ranges: list[Range]) -> np.ndarray:
        found = [number[place] for place in chain(*ranges)]
        return np.array(found, np.int64).reshape(-1, 2)

    layout = TemplateLayout(
        tuple(content_at.get(nth, piece) for nth, piece in enumerate(pieces)),
        np.array([number[start] for start in starts], np.int64),
        np.array(kinds, np.uint8),
        pieces_at(messages),
        pieces_at(spans),
        tuple(owners),
        (no_stop, unmarked, *missing),
        are_contents,
    )
    return Rendered(layout, pieces)


def _begin_kinds(
    blank: str,
    own: list[Part],
    said: Range,
    special: re.Pattern[str],
    begin: Callable[[int, Kind], None],
) -> bool:
    """Mark the kinds of an assistant message by `begin`; return whether a stop token ends it.

    What the template writes before a content has the kind of the content, except the end of the
    thinking before it. No thinking follows the name of a function.
    """
    (at, end), kind = said, Kind.TEXT
    for part in own:
        begin(at, Kind.THINKING if kind is Kind.THINKING else part.kind)
        match = _END_OF_THOUGHT.match(blank, at, part.start)
        if match and kind is not Kind.CALL:
            begin(at, Kind.THINKING)
            at = match.end()
        elif kind is Kind.THINKING and part.kind is Kind.TEXT:
            at = part.start
        begin(at, part.kind)
        at, kind = part.end, part.kind
    matches = [*special.finditer(blank, at, end)]
    has_stop = bool(matches) and not blank[matches[-1].end() : end].strip()
    stop = matches[-1].start() if has_stop else end
    match = _END_OF_THOUGHT.match(blank, at, stop)
    if match and kind is not Kind.CALL:
        begin(at, Kind.THINKING)
        at = match.end()
        kind = Kind.TEXT if kind is Kind.THINKING else kind
    begin(at, kind)
    if has_stop:
        begin(stop, Kind.STOP)
    return has_stop
