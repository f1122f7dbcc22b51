"""Renders chat templates by minijinja, which is Jinja in Rust, as `transformers` renders them.

A template gets copies of JSON, and reaches nothing else of Python. Fuel bounds the operations of a
rendering and the text that it makes. `strftime_now`, `lipsum` and the filter `random` are missing:
the same command makes the same data set.
"""

import contextlib
import functools
import importlib.util
import inspect
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Never

from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.pipeline.processes import is_child
from tokenfeed.tools.corpus.records import Unusable

_BEGIN, _END = "tokenfeed_begin", "tokenfeed_end"
"""Variables that a template writes in place of {% generation %} and {% endgeneration %}."""
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_KEPT = re.compile(
    r"\{%[-+]?\s*(?:(macro|call|filter|set\b[^=]*?%\}) | (end(?:macro|call|filter|set)\b)"
    r" | (generation) | (block|import|from|include|extends)) | \b(recursive)\s*[-+]?%\}",
    re.DOTALL | re.VERBOSE,
)
"""Matches the beginnings and ends of what is kept instead of written, {% generation %}, and other
tags that may keep text."""
_FUEL = 5_000_000
"""Operations of a rendering, and 1/64 of the bytes that it makes. A message takes about a hundred;
loops that do not end take seconds."""
_MEMORY, _SECONDS = 2 << 30, 20
"""Bytes that the process may grow by in a batch, and its time for a conversation."""
_MOST_CHARACTERS, _MOST_IN_TAG, _MOST_TAGS = 1_000_000, 5_000, 5_000
"""The longest template, tag (without its texts) and number of tags. More of them overflow the
stack of the compiler, which recurs."""
_OPENING, _CLOSING = re.compile(r"\{[{%]"), re.compile(r"[%}]\}")
_TEXT = re.compile(
    r""" "(?:[^"\\]|\\(?:.|\Z))*(?:"|\Z) | '(?:[^'\\]|\\(?:.|\Z))*(?:'|\Z) """,
    re.DOTALL | re.VERBOSE,
)
"""Matches a text; an open one up to the end, because others would be tried from each quote on."""
_NOT_WRITTEN = re.compile(
    rf"""\.\w+\([^()]*\) | (?:[=!]=|\bin)\s*(?:{_TEXT.pattern})
    | (?P<written>{_TEXT.pattern}) (?P<compared>\s*(?:[=!]=|(?:not\s+)?in\b))?""",
    re.DOTALL | re.VERBOSE,
)
_STRICT = re.compile(
    rf"""{_TEXT.pattern} | (?P<json>\|\s*tojson\b)
    | (?<![\w.])(?!(?:in|not|and|or|if|else|is)\b)
      (?P<value>\w+(?:\.\w+|\[[^][]*\]|\([^()]*\))*)(?P<slice>\[[^][:]*:[^][]*\])""",
    re.DOTALL | re.VERBOSE,
)
"""Matches `tojson`, and slices of variables. Jinja refuses both for a value that is missing."""
_INTEGER_BITS = 63
UNLIKE_SPACE = re.compile(r'"(?:\\[nrtf]|\s)*\\u001[c-f]|\\u001[c-f](?:\\[nrtf]|\s)*"')
"""Matches, in JSON, a text that begins or ends with a character that only Python takes for white
space, so that `trim` differs."""
_ADDRESS = re.compile(r"object at 0x[0-9a-f]+>")
_RAW = re.compile(r"\{%[-+]?\s*raw\b")
_PLACE = re.compile(r" \(in \w+:(\d+)\)")


_one_at_a_time = threading.Lock()
"""Held by the thread that renders, because limits are those of the process."""


class Exhausted(Unusable):
    """A template takes more fuel than a rendering has, or makes minijinja fail."""


@contextlib.contextmanager
def bounded() -> Iterator[Callable[[], None]]:
    """Bound the memory of this process, on Linux, and its time, except on Windows.

    Fuel does not pay for all that a template can do. It nests values until the stack overflows, or
    walks through lists that contain themselves. Here the system ends the process, and the parent
    names the template. Call the function that this yields before each conversation.
    """
    if not hasattr(signal, "setitimer") or importlib.util.find_spec("resource") is None:
        yield lambda: None
        return
    with _one_at_a_time, _limits():
        yield lambda: _end_after(_SECONDS)


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY
        if soft == resource.RLIM_INFINITY or most < soft:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    try:
        with _quiet() if is_child() else contextlib.nullcontext():
            yield
    finally:
        _end_after(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what libraries write to stderr when they end the process."""
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _end_after(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)


class Renderer:
    """A compiled template."""

    def __init__(self, source: str) -> None:
        """Compile the template.

        Raises:
            Unusable: It is not valid, or too long.
        """
        tags = [_TEXT.sub("", source[begin + 2 : end - 2]) for begin, end in _tags(source)]
        if max(len(source) / _MOST_CHARACTERS, len(tags) / _MOST_TAGS) > 1:
            raise Unusable(f"is too long: {len(source):,} characters with {len(tags):,} tags")
        if (longest := max(map(len, tags), default=0)) > _MOST_IN_TAG:
            raise Unusable(f"has a tag of {longest:,} characters, expected {_MOST_IN_TAG:,}")
        import minijinja  # only for conversations

        self._source = source
        self.has_generation = _GENERATION.search(source) is not None
        self.writes_in_order = _writes_in_order(source)
        """Whether what {% generation %} encloses is written at once, and not kept in a variable."""
        self._environment = made = minijinja.Environment(
            pycompat=True, trim_blocks=True, lstrip_blocks=True, debug=False, fuel=_FUEL
        )
        made.add_filter("tojson", to_json)
        made.add_filter("tokenfeed_sliced", _sliced)
        made.add_global("tokenfeed_missing", _Missing())
        made.add_test("iterable", lambda value: hasattr(value, "__iter__"))
        made.add_test("sequence", lambda value: hasattr(value, "__getitem__"))
        made.add_test("number", lambda value: isinstance(value, int | float | _Number))
        made.add_test("float", lambda value: isinstance(value, _Number))
        made.add_global("raise_exception", _refuse)
        made.remove_global("debug")
        try:
            made.add_template("text", _GENERATION.sub(_with_mark, _strict(source)))
        except BaseException as error:
            raise unusable("is not valid", error) from None

    def render(self, variables: dict[str, Any], begin: str = "", end: str = "") -> str:
        """Return the text. `begin` and `end` stand around what {% generation %} encloses.

        The variables are values of `copied`. A template can change them, because minijinja calls
        the methods of Python's lists and dicts.

        Raises:
            Unusable: The template fails, takes too long, or makes too much text.
        """
        marks = {_BEGIN: begin, _END: end}
        try:
            text = self._environment.render_template("text", **variables, **marks)
        except BaseException as error:
            raise unusable("the template fails", error) from None
        found = {*_ADDRESS.findall(text.lower())} if "0x" in text or "0X" in text else None
        if found and found - {*_ADDRESS.findall(f"{self._source}{variables}".lower())}:
            raise Unusable(
                "the template fails: it writes a method, like `messages.append`, with its "
                "address in memory, which differs between runs. Call the method"
            )
        return text

    @functools.cached_property
    def unset(self) -> set[str]:
        """The variables that the template reads and does not set."""
        source = _GENERATION.sub(_with_mark, self._source)
        return self._environment.undeclared_variables_in_str(source) - {_BEGIN, _END}


renderer = functools.cache(Renderer)
"""The renderer of a template, compiled once in a process."""


def texts_written(source: str) -> str:
    """Return a template without comments, and without the texts that it searches or compares."""
    return _with_tags(_without_comments(source), lambda tag: _NOT_WRITTEN.sub(_kept_text, tag))


def _with_tags(source: str, change: Callable[[str], str]) -> str:
    """Return a template with changed tags."""
    parts, at = [], 0
    for begin, end in _tags(source):
        parts += [source[at:begin], change(source[begin:end])]
        at = end
    return "".join([*parts, source[at:]])


def _kept_text(found: re.Match[str]) -> str:
    return "" if found["compared"] else found["written"] or ""


def _strict(source: str) -> str:
    """Return a template that fails where it slices a missing value or writes it as JSON."""
    if _RAW.search(source):
        return source
    pieces = _between_comments(source)
    return "".join(
        _with_tags(text, lambda tag: _STRICT.sub(_as_strict, tag)) + comment
        for text, comment in pieces
    )


def _as_strict(found: re.Match[str]) -> str:
    if found["json"]:
        return f"|default(tokenfeed_missing){found['json']}"
    return f"({found['value']}|tokenfeed_sliced){found['slice']}" if found["slice"] else found[0]


def _sliced(value: Any) -> Any:
    if value is None:
        raise TypeError("it slices a value that is missing")
    return value


def _tags(source: str) -> Iterator[tuple[int, int]]:
    """Yield where tags begin and end. A regular expression for all of them would take quadratic
    time where brackets stay open; so would one for comments."""
    at = 0
    while begin := _OPENING.search(source, at):
        if not (end := _CLOSING.search(source, begin.end())):
            break
        at = end.end()
        yield begin.start(), at


def _without_comments(source: str) -> str:
    return "".join(text for text, _ in _between_comments(source))


def _between_comments(source: str) -> Iterator[tuple[str, str]]:
    """Yield each text and the comment behind it; the last text has none."""
    at = 0
    while (begin := source.find("{#", at)) >= 0 and (end := source.find("#}", begin + 2)) >= 0:
        yield source[at:begin], source[begin : end + 2]
        at = end + 2
    yield source[at:], ""


def rendered_by_transformers(source: str, variables: dict[str, Any]) -> str | None:
    """Return the text that `transformers` makes, or its error; None if it cannot be asked."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    given = {name: value for name, value in variables.items() if name != "messages"}
    parameters = {*inspect.signature(render_jinja_template).parameters, "self"}
    if given.keys() & (parameters - {"tools", "documents", "add_generation_prompt"}):
        return None  # a record has an argument that is one of the function there
    try:
        conversations = [variables["messages"]]
        texts, _ = render_jinja_template(conversations, chat_template=source, **given)
    except Exception as error:  # whatever a template raises
        return f"{type(error).__name__}: {error}"
    text: str = texts[0]
    return text


def _with_mark(tag: re.Match[str]) -> str:
    left, is_end, right = tag.groups()  # white space is trimmed as for the tag
    return f"{{%{left} if true %}}{{{{ {_END if is_end else _BEGIN} }}}}{{% endif {right}%}}"


def _writes_in_order(source: str) -> bool:
    kept = 0
    source = _without_comments(source)
    for begin, end in _tags(source):
        for begins, ends, is_said, other, is_recursive in _KEPT.findall(source[begin:end]):
            kept += bool(begins) - bool(ends)
            if other or is_recursive or (is_said and kept):
                return False
    return True


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as the filter `tojson` of transformers does."""
    separators = separators and (separators[0], separators[1])
    return _encoder(ensure_ascii, indent, separators, sort_keys).encode(value)


@functools.lru_cache
def _encoder(
    ensure_ascii: bool, indent: int | None, separators: tuple[str, str] | None, sort_keys: bool
) -> json.JSONEncoder:
    return json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_value_of,
    )


class _Missing:
    """Stands for a value that is missing, and that a template writes as JSON."""


def _value_of(value: object) -> float:
    if isinstance(value, _Number):
        return value.value
    if isinstance(value, _Missing):
        raise TypeError("it writes a value that is missing as JSON")
    raise TypeError(f"{type(value).__name__} is no value of JSON")


def _refuse(message: object) -> Never:
    raise Unusable(str(message))


class _Number:
    """A number that minijinja would write in another way than Python: 1.0, 1e-7 or 10**20."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)

    def __eq__(self, other: object) -> bool:
        return self.value is other or self.value == other  # NaN only is itself

    __hash__ = None  # type: ignore[assignment]


_UNCHANGED = {str, bool, type(None)}
"""Types of values that need no copy."""


def copied(value: Any) -> Any:
    """Return a copy of a value of JSON."""
    if isinstance(value, dict):
        return {k: v if type(v) in _UNCHANGED else copied(v) for k, v in value.items()}
    if isinstance(value, list):
        return [each if type(each) in _UNCHANGED else copied(each) for each in value]
    if isinstance(value, int):
        return value if value.bit_length() < _INTEGER_BITS else _Number(value)
    return _Number(value) if isinstance(value, float) else value


def unusable(problem: str, error: BaseException) -> Unusable:
    """Return what a template raised as a reason for rejecting a record. Raise any other error."""
    name = type(error).__name__
    if isinstance(error, MemoryError):
        raise TokenizerError("the chat template takes too much memory. Use another one.") from None
    if not isinstance(error, Exception) and name != "PanicException":  # a fault of minijinja
        raise error
    reason = str(error)
    if isinstance(error, RecursionError):
        reason = name
    elif name == "TemplateError":
        reason = _reason_of(error)
    shown = " ".join(reason[:1000].split()).rstrip(".")
    is_exhausted = name == "PanicException" or getattr(error, "kind", "") == "OutOfFuel"
    made = Exhausted if is_exhausted else Unusable
    return made(f"{problem}: {shown[:200]}" if shown else problem)


def _reason_of(error: Any) -> str:
    """Return what minijinja says of an error, in one line."""
    if error.kind == "OutOfFuel":
        return "it takes too long, or writes too much"
    return _PLACE.sub(r" (line \1)", error.message.partition("\n")[0])
