"""Converts OpenAI chat messages to the shape that chat templates expect."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from penstock.core.errors import InvalidRequest

Message = dict[str, Any]

SHORT_ID = 9  # characters, which is what Mistral's templates take

# For templates that know nothing of tools. The tags are those of the Hermes format, which many models have seen.
TOOLS_PROMPT = """\
You may call these functions, described by JSON schemas:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON between tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def normalize(messages: list[Message], *, keep_parts: bool, keep_developer: bool) -> list[Message]:
    """Contents become strings, arguments objects unless they are none, and the assistant's refusals what it said. Text
    parts of the user stay lists where the template reads them; of others such a template may show the first alone."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    normalized = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequest(f"{where}.role must be a string such as 'user'", param=f"{where}.role")
        result = {**message, "content": _content(message, f"{where}.content", keep_parts and role == "user")}
        result.pop("refusal", None)
        if (reasoning := result.pop("reasoning", None)) is not None:
            result.setdefault("reasoning_content", reasoning)
        if role == "developer" and not keep_developer:  # what newer clients call the system message
            result["role"] = "system"
        if calls := result.pop("tool_calls", None):  # templates ask whether there is a list, not whether it is empty
            result["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
        normalized.append(result)
    return normalized


def _content(message: Message, where: str, keep_parts: bool) -> str | list[Message]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant":
        return message.get("refusal") or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of text parts", param=where)
    if message["role"] == "assistant":
        content = [_spoken(part) for part in content]
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"{where}[{index}] has type {kind!r}; this model reads text only: "
                'send {"type": "text", "text": "..."} or a plain string',
                param=where,
            )
    return content if keep_parts else _text(content)


def _spoken(part: Any) -> Any:
    """Turn a refusal part into a text part."""
    refused = isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str)
    return {"type": "text", "text": part["refusal"]} if refused else part


def _text(content: str | list[Message]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def as_parts(message: Message) -> Message:
    """Wrap a string as a list of parts, for templates that read only lists."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _tool_calls(calls: Any, where: str) -> list[Message]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list", param=where)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function must hold a name and arguments", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    elif not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.function.arguments must be a string of JSON", param=where)
    return {**call, "type": call.get("type") or "function", "function": {**function, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """An object, or the text as it is where it is none, as in a call that was cut off."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def shape_calls(message: Message, *, long_ids: bool, text: bool, objects: bool) -> Message:
    """A message as a template reads it that has its own ideas of ids, of content beside calls, or of arguments."""
    shaped = dict(message)
    if not long_ids and message.get("tool_call_id"):
        shaped["tool_call_id"] = _short_id(message["tool_call_id"])
    if message.get("tool_calls"):
        shaped["tool_calls"] = [_shape_call(call, long_ids, objects) for call in message["tool_calls"]]
        if not text and not message["content"]:
            shaped["content"] = None
    return shaped


def _shape_call(call: Message, long_ids: bool, objects: bool) -> Message:
    function = call["function"]
    if not objects and isinstance(function["arguments"], dict):
        function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "id": call.get("id") if long_ids else _short_id(call.get("id") or ""), "function": function}


def _short_id(id: str) -> str:
    return id if len(id) == SHORT_ID and id.isalnum() else blake2b(id.encode()).hexdigest()[:SHORT_ID]


def spell_out_tools(messages: list[Message], tools: list[Message]) -> list[Message]:
    """Say in plain text what a template without tools would leave out: schemas in the system message, calls in the
    assistant's words, results (those in a row together) as the user's."""
    spelled: list[Message] = []
    previous_role = ""
    for message in messages:
        role, content = message["role"], _text(message["content"])
        if role == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if previous_role == "tool":
                spelled[-1]["content"] += f"\n{result}"
            else:
                spelled.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            calls = [_spell_call(call["function"]) for call in message["tool_calls"]]
            spelled.append({"role": role, "content": "\n".join([content, *calls] if content else calls)})
        else:
            spelled.append(message)
        previous_role = role
    return _add_to_system(spelled, _spell_tools(tools)) if tools else spelled


def _spell_call(function: Message) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _spell_tools(tools: list[Message]) -> str:
    schemas = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    return TOOLS_PROMPT.format(tools="\n".join(schemas))


def _add_to_system(messages: list[Message], text: str) -> list[Message]:
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{_text(first['content'])}\n\n{text}"}, *messages[1:]]
