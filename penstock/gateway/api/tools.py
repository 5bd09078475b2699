"""The tools of a chat: which functions may be called, whether one must be, and how the answer is to be read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.core.errors import InvalidRequest
from penstock.core.request import ReasoningStart
from penstock.gateway.api.openai_types import ChatRequest
from penstock.gateway.api.reading import ModelText
from penstock.gateway.api.structured import grammar_of
from penstock.gateway.errors import require
from penstock.text.output import OutputForm
from penstock.text.reasoning import OPEN, start_after
from penstock.text.tool_calls.parser import Function

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
CHOICES = ("none", "auto", "required")


def functions_of(tools: Sequence[dict[str, Any]] | None) -> tuple[Function, ...]:
    """The functions that a request describes."""
    functions = tuple(_function(tool, f"tools[{position}]") for position, tool in enumerate(tools or ()))
    for name, count in Counter(function.name for function in functions).items():
        require(count == 1, "tools", f"must not define {name} twice")
    return functions


def _function(tool: dict[str, Any], where: str) -> Function:
    kind = tool.get("type")
    require(kind == "function", f"{where}.type", f'must be "function", not {str(kind)[:40]!r}')
    given = tool.get("function")
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where}.function must describe a function", param=f"{where}.function")
    name, parameters, strict = given.get("name"), given.get("parameters"), given.get("strict")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        rule = "must be of up to 128 letters, digits, dots, dashes and underscores"
        raise InvalidRequest(f"{where}.function.name {rule}", param=f"{where}.function.name")
    of_object = parameters is None or (isinstance(parameters, dict) and parameters.get("type", "object") == "object")
    require(of_object, f"{where}.function.parameters", "must be a JSON schema of an object")
    require(strict is None or isinstance(strict, bool), f"{where}.function.strict", "must be true or false")
    return Function(name, parameters or {}, bool(strict))


def _chosen(choice: Any, functions: tuple[Function, ...]) -> tuple[str, tuple[Function, ...]]:
    """What `tool_choice` says: one of CHOICES or `named`, and the functions that it leaves."""
    if choice is None:
        return ("auto" if functions else "none"), functions
    if isinstance(choice, dict) and "function" in choice and choice.get("type", "function") == "function":
        return "named", _named([choice], functions)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        if isinstance(allowed, dict) and isinstance(listed, list) and allowed.get("mode") in CHOICES[1:]:
            return allowed["mode"], _named(listed, functions)
    if choice not in CHOICES:
        raise InvalidRequest(
            f"tool_choice must be {', '.join(CHOICES)}, a function as "
            '{"type": "function", "function": {"name": "..."}}, or allowed_tools',
            param="tool_choice",
        )
    require(choice != "required" or bool(functions), "tool_choice", "needs tools")
    return choice, functions


def _named(entries: Sequence[Any], functions: tuple[Function, ...]) -> tuple[Function, ...]:
    by_name = {function.name: function for function in functions}
    found = []
    for entry in entries:
        function = entry.get("function") if isinstance(entry, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        known = isinstance(name, str) and name in by_name
        require(known, "tool_choice", f"names {str(name)[:80]!r}, which is none of the tools")
        found.append(by_name[str(name)])
    require(bool(found), "tool_choice", "must name a function")
    return tuple(found)


def shown_tools(body: ChatRequest) -> list[dict[str, Any]] | None:
    """What the chat template is given."""
    return None if body.tool_choice == "none" else body.tools


def read_form(body: ChatRequest, text: ModelText, prompt: str) -> tuple[str, OutputForm | None]:
    """A rendered prompt and how to read the answer to it; None: as text.

    Where the answer is constrained it must be certain whether the model reasons first. A template that leaves that open
    belongs to a model that does, unless it is told not to, so the reasoning is opened in the prompt.
    """
    if not body.tools and body.tool_choice is None and text.reasoning is None:
        return prompt, None
    choice, functions = _chosen(body.tool_choice, functions_of(body.tools))
    forced = choice in ("required", "named")
    if forced and text.tools is None:
        raise InvalidRequest(
            f"tool_choice {choice} is not possible: the format of this model's tool calls is not known; the operator "
            "can set models.*.tool_parser",
            param="tool_choice",
        )
    form = OutputForm(
        tools=text.tools if functions and choice != "none" else None,
        functions=functions,
        choice="forced" if forced else "auto",
        one_call=choice == "named" or body.parallel_tool_calls is False,
        reasoning=None if text.reasoning is None else _start(body, prompt),
    )
    if form.reasoning == "free" and (form.constrains or grammar_of(body) is not None):
        return f"{prompt}{OPEN}\n", replace(form, reasoning="open")
    return prompt, form


def _start(body: ChatRequest, prompt: str) -> ReasoningStart | None:
    """None: the answer has been begun by the client, and what follows is its text."""
    start = start_after(prompt)
    return None if body.continue_final_message and start != "open" else start
