"""The sandbox in which chat templates run, with the settings and the tags of transformers.

`Watch` also notes how a template uses the contents of messages. Contents are marked by characters
for private use, so a text that has such a character is a content, or was made of one. Output,
concatenation, assignment and truth values treat every content that is not empty alike. The other
operations go through the sandbox: they are noted with their result, or end the watch.
"""

import functools
import json
import operator
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.utils
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment

FIRST_MARK, MARKS = 0x100000, 0xFFFC
"""The marks: all characters for private use of the last plane but two."""
_LEAF_MARKS = chr(FIRST_MARK + MARKS), chr(FIRST_MARK + MARKS + 1)
"""The last two. They stand around each text in the arguments of a call, but not in its JSON."""
MARK = re.compile(f"[{chr(FIRST_MARK)}-{_LEAF_MARKS[1]}]")


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} of transformers: notes the enclosed text and where it begins."""

    tags = {"generation"}  # noqa: RUF012 - jinja's

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.found: list[tuple[int, str]] = []
        self.length = 0
        """Characters that were rendered so far."""

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text: str = caller()
        self.found.append((self.length, text))
        return text


def generated_by(
    template: jinja2.Template, variables: dict[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Render a template. Return the text, and what {% generation %} encloses.

    Jinja renders a macro, a block of {% set %} and a block of {% filter %} before it writes them. A
    tag inside of them may begin at another place than noted.

    Raises:
        TemplateError: The enclosed texts overlap, or are not where they were noted.
    """
    tracker: Any = template.environment.extensions[_Generation.identifier]
    tracker.found, tracker.length = [], 0
    pieces = []
    for piece in template.generate(variables):
        pieces.append(piece)
        tracker.length += len(piece)
    rendered, ranges, last = "".join(pieces), list[tuple[int, int]](), 0
    for start, text in tracker.found:
        if start < last or not rendered.startswith(text, start):
            raise jinja2.TemplateError(
                "it is not certain what {% generation %} encloses. Move the tag out of other tags "
                "{% generation %}, and out of macros, {% set %} and {% filter %}"
            )
        last = start + len(text)
        ranges.append((start, last))
    return rendered, ranges


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return a dict: `dict` in templates. The methods of the type itself would change messages."""
    return dict(*args, **kwargs)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as the filter `tojson` of transformers does."""
    if isinstance(value, MarkedObject):
        return value.to_json(ensure_ascii, indent, separators, sort_keys)
    separators = separators and (separators[0], separators[1])
    return _encoder(ensure_ascii, indent, separators, sort_keys).encode(value)


@functools.lru_cache
def _encoder(
    ensure_ascii: bool, indent: int | None, separators: tuple[str, str] | None, sort_keys: bool
) -> json.JSONEncoder:
    return json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class MarkedObject(dict[str, Any]):
    """An object that is not empty, such as the arguments of a call. Its JSON has marks around it.

    A template may test the type of the object, and write the object as JSON. All else reads the
    object, and gets texts with marks if `has_leaves`.
    """

    def __init__(self, value: dict[str, Any], marks: tuple[str, str], *, has_leaves: bool) -> None:
        super().__init__(_with_marks(value) if has_leaves else value)
        self._value, self._marks = value, marks
        self.settings: tuple[Any, ...] | None = None
        """The arguments of `to_json`, as the template gave them; None if it wrote no JSON."""
        self.is_read = False
        """Whether the text may depend on the object in other ways."""

    def to_json(self, *settings: Any) -> str:
        """Return the JSON between the marks."""
        self.is_read |= self.settings not in (None, settings)
        self.settings = settings
        opening, closing = self._marks
        return f"{opening}{to_json(self._value, *settings)}{closing}"

    def __bool__(self) -> bool:
        return True


def _with_marks(value: Any) -> Any:
    """Return a value of JSON with marks around its texts. The keys of objects have none."""
    if isinstance(value, dict):
        return {key: _with_marks(each) for key, each in value.items()}
    if isinstance(value, list):
        return [*map(_with_marks, value)]
    return value.join(_LEAF_MARKS) if isinstance(value, str) and value else value


def _reading(name: str) -> Callable[..., Any]:
    def read(self: MarkedObject, *args: Any) -> Any:
        self.is_read = True
        return getattr(dict, name)(self, *args)

    return read


for _name in ("__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__or__"):
    setattr(MarkedObject, _name, _reading(_name))
for _name in ("__repr__", "__reversed__", "__ror__", "copy", "get", "items", "keys", "values"):
    setattr(MarkedObject, _name, _reading(_name))


class _Namespace(jinja2.utils.Namespace):
    """`namespace` in templates. It has no names such as `__self__`: Python would believe them."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may set `self`
        given = dict(*args[1:], **kwargs)
        any(map(_check_name, given))
        jinja2.utils.Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not have the name {name!r:.40}")


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


_OF_DICT = frozenset(dir(dict))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, faster at `message.role`: a plain dict has no attributes but those of dict.

    `strftime_now`, `lipsum` and the filter `random` are missing: the same command makes the same
    data set.
    """

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.filters["tojson"] = to_json
        self.globals |= {"raise_exception": _raise, "dict": _dict, "namespace": _Namespace}
        del self.globals["lipsum"], self.filters["random"]

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) in (dict, MarkedObject) and attribute not in _OF_DICT:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


@functools.cache
def compiled(source: str) -> jinja2.Template:
    """Compile a template."""
    return _Environment().from_string(source)


def parsed(source: str) -> jinja2.nodes.Template:
    """Parse a template."""
    return _Environment().parse(source)


def texts_written(node: jinja2.nodes.Node) -> Iterator[str]:
    """Yield the texts of a template that it may write: not those that it searches or compares."""
    if isinstance(node, jinja2.nodes.TemplateData):
        yield node.data
    elif isinstance(node, jinja2.nodes.Const):
        yield str(node.value)
    elif isinstance(node, jinja2.nodes.Call) and isinstance(node.node, jinja2.nodes.Getattr):
        yield from texts_written(node.node.node)  # not the arguments, such as those of `split`
    elif not isinstance(node, jinja2.nodes.Compare | jinja2.nodes.Test):
        for child in node.iter_child_nodes():
            yield from texts_written(child)


Pattern = tuple[str | int, ...]
"""A text with contents: literal texts, and numbers of contents."""


class Use(NamedTuple):
    """A method of `str` that a template called, and its result."""

    text: Pattern
    method: str
    arguments: tuple[Any, ...]
    result: Any
    """A pattern, a list of patterns, or another value."""

    def is_same(self, contents: list[str]) -> bool:
        """Return whether the method has the same result with other contents."""
        try:
            found = getattr(_filled(self.text, contents), self.method)(*self.arguments)
        except ValueError:
            return False
        same: bool = found == _filled(self.result, contents)
        return same


def _filled(value: Any, contents: list[str]) -> Any:
    """Return patterns with their contents, and other values as they are."""
    if isinstance(value, list):
        return [_filled(each, contents) for each in value]
    if not isinstance(value, tuple):
        return value
    if len(value) == 1:
        return contents[value[0]]
    return "".join(contents[each] if isinstance(each, int) else each for each in value)


_TEXT_METHODS = {"capitalize", "count", "endswith", "find", "index", "isalpha", "isdigit"}
_TEXT_METHODS |= {"join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace"}
_TEXT_METHODS |= {"rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"}
_TEXT_METHODS |= {"isspace", "startswith", "strip", "title", "upper"}
"""Methods of `str` that a watch may call itself. `format` must go through the sandbox."""
_KEEPING_FILTERS = {"default", "d", "string"}
"""Filters that return a content as it is."""
_LIST_FILTERS = {"default", "d", "length", "count", "list", "first", "last", "map", "select"}
_LIST_FILTERS |= {"reject", "selectattr", "rejectattr", "items", "join", "reverse"}
"""Filters that read no content in a list, beside what other filters and tests read."""
_TYPE_TESTS = {"defined", "undefined", "none", "string", "mapping", "iterable", "sequence"}
_TYPE_TESTS |= {"number", "boolean", "true", "false", "integer", "float", "callable"}


class Watch:
    """Renders a template with marked contents, and notes how it uses them."""

    def __init__(self, source: str) -> None:
        """Compile the template."""
        self._uses: list[Use] | None = []
        self._is_given_up = False
        self.template = _WatchedEnvironment(self).from_string(source)

    def end(self) -> list[Use] | None:
        """Return what the text depends on since the last call, beside the contents themselves;
        None if it may depend on contents in any way."""
        uses, self._uses = self._uses, []
        return None if self._is_given_up else uses

    def has_marks(self, value: Any) -> bool:
        """Return whether a JSON value contains the content of a message."""
        if isinstance(value, str):
            return MARK.search(value) is not None
        if isinstance(value, MarkedObject):
            return True
        if isinstance(value, dict):
            return any(map(self.has_marks, (*value, *value.values())))
        if isinstance(value, list | tuple):
            return any(map(self.has_marks, value))
        harmless = int | float | jinja2.Undefined | jinja2.runtime.Macro | None
        return not isinstance(value, harmless)

    def is_marked(self, value: Any) -> bool:
        """Return whether a value is a text with a content."""
        return isinstance(value, str) and MARK.search(value) is not None

    def give_up(self) -> None:
        """Note that the text may depend on contents in any way."""
        self._uses = None

    def give_up_always(self) -> None:
        """Note that every text of the template may depend on contents in any way."""
        self._is_given_up = True

    def ask(self, text: str, method: str, *arguments: Any) -> Any:
        """Call a method of a text with marks, and note the result."""
        result = getattr(text, method)(*arguments)
        pattern, expected = self._pattern(text), self._pattern(result)
        if pattern is None or expected is None or self.has_marks(arguments):
            self.give_up()
        elif self._uses is not None:
            self._uses.append(Use(pattern, method, arguments, expected))
        return result

    def _pattern(self, value: Any) -> Any:
        """Return a text with marks as a pattern; None if an opening or a closing mark is missing.

        A list becomes a list of patterns. Texts without marks and numbers stay as they are.
        """
        if isinstance(value, list):
            made = [self._pattern(each) for each in value]
            return None if None in made else made
        if not self.is_marked(value):
            return value if isinstance(value, str | int) else None
        marks = [ord(mark) - FIRST_MARK for mark in MARK.findall(value)]
        if any(m % 2 for m in marks[::2]) or marks[1::2] != [m + 1 for m in marks[::2]]:
            return None
        pieces: list[Any] = MARK.split(value)
        pieces[1::2] = [mark // 2 for mark in marks[::2]]
        return tuple(piece for piece in pieces if piece != "")


class _Operators(jinja2.visitor.NodeTransformer):
    """Has the operators that Jinja compiles to Python's call filters of `_WatchedEnvironment`."""

    def visit_Compare(self, node: Any) -> Any:
        """Compare each operand with the next."""
        self.generic_visit(node)
        left, pairs = node.expr, []
        for operand in node.ops:
            arguments = [jinja2.nodes.Const(operand.op), operand.expr]
            pairs.append(_filtered(left, " compare", arguments))
            left = operand.expr
        return functools.reduce(lambda a, b: jinja2.nodes.And(a, b, lineno=node.lineno), pairs)

    def visit_For(self, node: Any) -> Any:
        """Watch what a loop takes apart."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, " cut", [])
        return node

    def visit_Getitem(self, node: Any) -> Any:
        """Watch what a slice cuts. The environment gets all other subscripts."""
        self.generic_visit(node)
        if isinstance(node.arg, jinja2.nodes.Slice):
            node.node = _filtered(node.node, " cut", [])
        return node


def _filtered(node: Any, name: str, arguments: list[Any]) -> Any:
    return jinja2.nodes.Filter(node, name, arguments, [], None, None, lineno=node.lineno)


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda value, values: value in values,
    "notin": lambda value, values: value not in values,
}


class _WatchedEnvironment(_Environment):
    """The sandbox, which reports to a `Watch`."""

    intercepted_binops = frozenset(["%", "*"])

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self.optimized = False  # filters of constants would run when the template is compiled
        for name, function in self.filters.items():
            self.filters[name] = self._noting(name, function, self._filtered)
        for name, function in self.tests.items():
            self.tests[name] = self._noting(name, function, self._tested)
        self.filters |= {" compare": self._compare, " cut": self._cut}

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Parse a template; see `_Operators`. With autoescape, output depends on characters, and
        equal keys of a dict are one."""
        tree: jinja2.nodes.Template = _Operators().visit(super()._parse(source, name, filename))
        keys = (pair.key for pair in tree.find_all(jinja2.nodes.Pair))
        has_keys = any(not isinstance(key, jinja2.nodes.Const) for key in keys)
        if has_keys or tree.find(jinja2.nodes.EvalContextModifier):
            self._watch.give_up_always()
        return tree

    def _compare(self, left: Any, operation: str, right: Any) -> bool:
        """Return the result of a comparison, and note what it tells of contents."""
        watch = self._watch
        if operation in ("in", "notin"):
            found = self._is_in(left, right)
        elif operation in ("eq", "ne"):
            found = self._is_equal(left, right)
        else:
            found = None
        if found is not None:
            return found is (operation in ("in", "eq"))
        if watch.has_marks([left, right]):
            watch.give_up()
        return _COMPARISONS[operation](left, right)

    def _is_equal(self, left: Any, right: Any) -> bool | None:
        """Return whether a content is a text; None if neither is a content."""
        if self._watch.is_marked(right):
            left, right = right, left
        if not self._watch.is_marked(left):
            return None
        return isinstance(right, str) and bool(self._watch.ask(left, "__eq__", right))

    def _is_in(self, value: Any, values: Any) -> bool | None:
        """Return whether a content has a text; None for other values."""
        if self._watch.is_marked(values):
            return bool(self._watch.ask(values, "__contains__", value))
        if isinstance(values, dict) and not self._watch.has_marks([value, *values]):
            return value in values
        return None

    def _cut(self, value: Any) -> Any:
        if self._watch.is_marked(value):
            self._watch.give_up()
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See `SandboxedEnvironment`. Filters get paths such as `content.1` here, too."""
        if not isinstance(argument, str):
            self._cut(obj)
        if self._watch.has_marks(argument):
            self._watch.give_up()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See `SandboxedEnvironment`."""
        if self._watch.has_marks([left, right]):
            self._watch.give_up()
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See `SandboxedEnvironment`."""
        watch = __self._watch
        named = {key: kwargs[key] for key in kwargs if key not in ("_loop_vars", "_block_vars")}
        # Only Python makes objects of this type, so `__self__` and `__name__` are true.
        owner: Any = __obj.__self__ if type(__obj) is types.BuiltinMethodType else None
        is_known = type(owner) is str and __obj.__name__ in _TEXT_METHODS and not named
        if is_known and watch.is_marked(owner):
            return watch.ask(owner, __obj.__name__, *args)
        if __self._may_read(__obj, args, named):
            watch.give_up()
        return __self._without_markup(super().call(__context, __obj, *args, **kwargs))

    def _may_read(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Return whether a function may read contents, in its owner or in its arguments."""
        if isinstance(function, jinja2.runtime.Macro):
            return False  # its body is watched
        if function in (_dict, _Namespace):
            # A dict copies its keys, which have no marks. The keys of pairs may have some.
            return self._watch.has_marks([each for each in args if not isinstance(each, dict)])
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, dict | jinja2.runtime.LoopContext | _Generation):
            owner = None  # a dict returns its values, a MarkedObject notes it
        return self._watch.has_marks([owner, *args, *named.values()])

    def _without_markup(self, value: Any) -> Any:
        """Return a value. `Markup` escapes the contents to which it is added."""
        if hasattr(value, "__html__"):
            self._watch.give_up()
        return value

    def _noting(self, name: str, function: Any, note: Callable[..., None]) -> Any:
        skipped = hasattr(function, "jinja_pass_arg")

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            note(name, args[skipped], [*args[1 + skipped :], *kwargs.values()])
            return self._without_markup(function(*args, **kwargs))

        return noted

    def _filtered(self, name: str, value: Any, arguments: list[Any]) -> None:
        watch = self._watch
        if watch.is_marked(value):
            if name == "trim":
                watch.ask(value, "strip", *arguments)
            elif name not in _KEEPING_FILTERS:
                watch.give_up()
        elif name == "tojson" and isinstance(value, MarkedObject):
            pass  # the object notes how it is written
        elif name not in _LIST_FILTERS and watch.has_marks(value):
            watch.give_up()
        if name not in ("default", "d") and watch.has_marks(arguments):
            watch.give_up()

    def _tested(self, name: str, value: Any, arguments: list[Any]) -> None:
        if name not in _TYPE_TESTS and self._watch.has_marks([value, arguments]):
            self._watch.give_up()
