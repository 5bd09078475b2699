"""From a request of Anthropic's Messages API to the chat that it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.gateway.api import anthropic_types as types
from penstock.gateway.api.chat import ChatReader, count_chat
from penstock.gateway.api.decoding import decode_json
from penstock.gateway.api.messages import FunctionCall, Message, ToolCall
from penstock.gateway.api.openai_types import ChatRequest, JsonSchemaFormat, ResponseFormat
from penstock.gateway.api.reading import ModelText, Prompt, Terms
from penstock.gateway.api.serving import encode_json
from penstock.gateway.errors import require

# Claude Code begins its system prompt with a block for Anthropic's accounting. It differs from version to version, so
# it would keep prompts that are otherwise equal from sharing their prefix.
ATTRIBUTION = "x-anthropic-billing-header:"

_EFFORTS = {"xhigh": "high", "max": "high"}  # no chat template knows more than three
_TOOL_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}

NO_THREADS = "thread_unsupported_request"  # by which Anthropic's clients know it


class AnthropicChat(ChatRequest, kw_only=True):
    """A chat, and what the answer to it must know of the request that it was made of."""

    show_thinking: bool = False
    omit_thinking: bool = False  # its blocks are there, but empty


class MessagesReader(ChatReader):
    name = "messages"
    requests = msgspec.json.Decoder(types.MessagesRequest)

    def decode(self, body: bytes, terms: Terms) -> AnthropicChat:
        asked = decode_json(self.requests, body, ignore_unknown=terms.ignore_unknown)
        if asked.thread is not None:
            problem = "this server keeps no threads: send all messages, and no thread"
            raise InvalidRequest(problem, param="thread", code=NO_THREADS)
        thinking = asked.thinking
        thinks = thinking is not None and thinking.type != "disabled"
        user = asked.metadata.user_id if asked.metadata is not None else None
        return AnthropicChat(
            **_chat_fields(asked),
            max_tokens=asked.max_tokens,
            stream=asked.stream,
            stop=asked.stop_sequences,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            user=user,
            prompt_cache_key=user,  # Claude Code puts its session there
            service_tier="default" if asked.service_tier == "standard_only" else asked.service_tier,
            show_thinking=thinks,
            omit_thinking=thinking is not None and thinking.display == "omitted",
        )


class CountReader:
    name = "count_tokens"
    requests = msgspec.json.Decoder(types.CountRequest)

    def __init__(self, texts: Mapping[str, ModelText]) -> None:
        self.texts = texts

    def read(self, body: bytes, terms: Terms) -> tuple[bytes, list[Prompt]]:
        asked = decode_json(self.requests, body, ignore_unknown=terms.ignore_unknown)
        chat = ChatRequest(**_chat_fields(asked))
        name = terms.base_of(terms.served(chat.model))
        return encode_json(types.TokenCount(count_chat(self.texts[name], chat, terms.bounds[name]))), []


def _chat_fields(asked: types.CountRequest) -> dict[str, Any]:
    """Fields of a `ChatRequest`: those that decide the prompt."""
    messages = [*_system(asked.system), *_conversation(asked.messages)]
    require(len(messages) > 0, "messages", "must hold some text")
    output = asked.output_config or types.OutputConfig()
    format = output.format or asked.output_format
    choice = asked.tool_choice
    thinks = asked.thinking is not None and asked.thinking.type != "disabled"
    return {
        "model": asked.model,
        "messages": messages,
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(asked.tools or ())] or None,
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "reasoning_effort": _EFFORTS.get(output.effort, output.effort) if output.effort is not None else None,
        "chat_template_kwargs": {"enable_thinking": thinks},
        "continue_final_message": messages[-1].role == "assistant",
        "response_format": None
        if format is None
        else ResponseFormat("json_schema", JsonSchemaFormat(schema=format.schema)),
    }


def _system(system: str | list[types.TextBlock] | None) -> list[Message]:
    parts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    text = "\n\n".join(part for part in parts if part and not part.startswith(ATTRIBUTION))
    return [Message(role="system", content=text)] if text else []


def _conversation(given: Sequence[types.MessageParam]) -> list[Message]:
    """Turns of one role in a row are one turn. A system message in between is said by the user, since chat templates
    take one at the beginning only."""
    messages: list[Message] = []
    for index, message in enumerate(given):
        where = f"messages[{index}].content"
        blocks = [types.TextBlock(message.content)] if isinstance(message.content, str) else message.content
        if message.role == "assistant":
            _add_assistant(messages, blocks, where)
        else:
            _add_user(messages, blocks, where)
    return messages


def _add_assistant(messages: list[Message], blocks: Sequence[types.Block], where: str) -> None:
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant", content=""))
    turn = messages[-1]
    for index, block in enumerate(blocks):
        if isinstance(block, types.TextBlock):
            turn.content = f"{turn.content}{block.text}"
        elif isinstance(block, types.ThinkingBlock):
            turn.reasoning_content = (turn.reasoning_content or "") + block.thinking
        elif isinstance(block, types.ToolUseBlock):
            call = ToolCall(FunctionCall(block.name, block.input), block.id)
            turn.tool_calls = [*(turn.tool_calls or ()), call]
        elif not isinstance(block, types.RedactedThinkingBlock):
            raise _misplaced(block, f"{where}[{index}]", "assistant")


def _add_user(messages: list[Message], blocks: Sequence[types.Block], where: str) -> None:
    texts = []
    for index, block in enumerate(blocks):
        if isinstance(block, types.ToolResultBlock):
            content = _result(block, f"{where}[{index}].content")
            messages.append(Message(role="tool", tool_call_id=block.tool_use_id, content=content))
        else:
            texts.append(_text(block, f"{where}[{index}]"))
    text = "\n".join(texts)
    if not text:
        return
    if messages and messages[-1].role == "user":
        messages[-1].content = f"{messages[-1].content}\n{text}"
    else:
        messages.append(Message(role="user", content=text))


def _result(block: types.ToolResultBlock, where: str) -> str:
    content = block.content
    if not isinstance(content, list):
        text = content or ""
    else:
        text = "\n".join(_text(part, f"{where}[{index}]") for index, part in enumerate(content))
    return f"Error: {text}" if block.is_error else text


def _text(block: types.Block, where: str) -> str:
    if isinstance(block, types.TextBlock):
        return block.text
    if isinstance(block, types.ImageBlock):
        raise InvalidRequest(f"{where} is an image; this model reads text only", param=where)
    if isinstance(block, types.DocumentBlock):
        data = block.source.get("data")
        if block.source.get("type") != "text" or not isinstance(data, str):
            raise InvalidRequest(f"{where}.source must be plain text: this model reads no files", param=where)
        return f"{block.title}\n\n{data}" if block.title else data
    raise _misplaced(block, where, "user")


def _misplaced(block: types.Block, where: str, role: str) -> InvalidRequest:
    kind = block.__struct_config__.tag
    return InvalidRequest(f"{where} is of type {kind}, which no message of the {role} has", param=where)


def _tool(tool: types.ToolParam, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        message = f"{where}.type {tool.type[:40]!r} is a tool that this server does not have: describe it as custom"
        raise InvalidRequest(message, param=f"{where}.type")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema or {"type": "object"}}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: types.ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        require(choice.name is not None, "tool_choice.name", "is required with type tool")
        return {"type": "function", "function": {"name": choice.name}}
    return _TOOL_CHOICES[choice.type]
