"""Jinja as chat templates expect it, in a sandbox. Imports jinja2, so it is itself imported at the first template.

Templates come with the model and are trusted not to be malicious, but numbers in a request must not make one run or
grow without end: output, `range` and repetition are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from itertools import product, starmap
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARACTERS = 32 * 2**20
MAX_RANGE_ITEMS = 100_000  # over all `range` calls of one rendering
MAX_REPEATED_ITEMS = 2**20
MAX_EXPONENT = 64
MAX_REMEMBERED = 1000  # attributes; a template may compute their names

TYPE_TESTS = {"string", "iterable", "sequence", "mapping"}  # how templates tell a string from a list of parts

# The names a template gets from here and from `ChatTemplate`; `chat_template_kwargs` must not replace them.
RESERVED_NAMES = {
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "range",
    "raise_exception",
    "strftime_now",
}


class CallShape(NamedTuple):
    """How a template reads messages with tool calls."""

    long_ids: bool = True  # False: only ids of nine letters and digits
    text: bool = True  # their content is a string; False: none
    objects: bool = True  # their arguments are objects; False: JSON text

    def probe(self) -> list[dict[str, Any]]:
        id = "call_0123456789" if self.long_ids else "a1b2c3d4e"
        arguments: Any = {"probe_key": "probe value"}
        function = {"name": "f", "arguments": arguments if self.objects else json.dumps(arguments)}
        calls = [{"id": id, "type": "function", "function": function}]
        return [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "" if self.text else None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": id, "content": "b"},
        ]


class TemplateRefusal(TemplateError):
    """The template called `raise_exception`."""


class CompiledTemplate:
    """A template and what its source shows about the messages that it can read."""

    def __init__(self, source: str) -> None:
        environment = _Sandbox()
        tree = environment.parse(source)
        names = {node.name for node in tree.find_all(nodes.Name)}
        self._template = environment.from_string(source)
        self._globals = dict(self._template.globals)
        self.knows_tools = "tools" in names
        self.knows_developer = "developer" in {node.value for node in tree.find_all(nodes.Const)}
        self.reads_parts = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
        self.reads_strings = not self.reads_parts or any(test.name in TYPE_TESTS for test in tree.find_all(nodes.Test))

    @cached_property
    def call_shape(self) -> CallShape:
        """The first shape whose arguments it writes as they are: not as Python has them, and not quoted twice."""
        names = {"tools": None, "documents": None, "add_generation_prompt": False, "bos_token": "", "eos_token": ""}
        for shape in starmap(CallShape, product((True, False), repeat=len(CallShape._fields))):
            try:
                text = self.render({**names, "messages": shape.probe()})
            except Exception:  # a template can raise whatever Python can
                continue
            if "probe value" in text and "'probe_key'" not in text and '\\"probe_key' not in text:
                return shape
        return CallShape()

    def render(self, variables: dict[str, Any]) -> str:
        pieces, size = [], 0
        names = {**self._globals, **variables, "range": _bounded_range()}
        context = Context(self._template.environment, names, None, self._template.blocks)
        for piece in self._template.root_render_func(context):
            size += len(piece)
            if size > MAX_OUTPUT_CHARACTERS:
                raise SecurityError(f"its output exceeds {MAX_OUTPUT_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self._safe: dict[tuple[type, str], bool] = {}
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Decided by type and name, so once for each that a template reads."""
        safe = self._safe.get((type(obj), attr))
        if safe is None:
            safe = super().is_safe_attribute(obj, attr, value)
            if len(self._safe) < MAX_REMEMBERED:
                self._safe[type(obj), attr] = safe
        return safe

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int) and abs(right) > MAX_EXPONENT:
            raise SecurityError(f"an exponent exceeds {MAX_EXPONENT}")
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(items, "__len__") and len(items) * times > MAX_REPEATED_ITEMS:
                    raise SecurityError(f"a repetition exceeds {MAX_REPEATED_ITEMS} items")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - the attribute jinja2 declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _is_content(node: nodes.Node) -> bool:
    """`message.content`, `message['content']` or a variable called `content`."""
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _bounded_range() -> Callable[..., range]:
    left = MAX_RANGE_ITEMS

    def bounded(*bounds: int) -> range:
        nonlocal left
        items = range(*bounds)
        left -= len(items)
        if left < 0:
            raise SecurityError(f"its loops exceed {MAX_RANGE_ITEMS} items of range()")
        return items

    return bounded


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models have not seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
