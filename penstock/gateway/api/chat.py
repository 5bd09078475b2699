"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.errors import InvalidRequest
from penstock.core.request import RANGES
from penstock.gateway.api.bounds import Bounds
from penstock.gateway.api.choices import Choice
from penstock.gateway.api.generation import Emit
from penstock.gateway.api.logprobs import chat_logprobs, prompt_logprobs
from penstock.gateway.api.messages import (
    ChatDelta,
    ChatFinishReason,
    ChatMessage,
    FunctionDelta,
    FunctionText,
    MessageToolCall,
    ToolCallDelta,
)
from penstock.gateway.api.openai_types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    TokenizeRequest,
    Usage,
)
from penstock.gateway.api.reading import BlamedOn, ModelText, Prompt, Terms
from penstock.gateway.api.semantic import similar_chat
from penstock.gateway.api.serving import event
from penstock.gateway.api.slices import shaped
from penstock.gateway.api.text_generation import ChunkedAnswer, TextEndpoint, TextReader, Wanted
from penstock.gateway.api.tools import read_form, shown_tools
from penstock.gateway.errors import require
from penstock.text.output import OutputForm
from penstock.text.stream import TextDelta, TextStream
from penstock.text.template_sandbox import RESERVED_NAMES
from penstock.text.tool_calls.parser import CallDelta

ROLES = ("system", "developer", "user", "assistant", "tool")

MAX_SPELLING = 6  # bytes of JSON that one byte of text may take, as \u0041
END_OF_TEXT = "\uf8ff\ufdd0"  # characters for private use, and for none
ROOM_FOR_OPTIONS = 2**20  # bytes of a body beside its text, such as white space


class ChatReader(TextReader[ChatRequest]):
    name = "chat"
    decoder = msgspec.json.Decoder(ChatRequest)
    without_prompt: ClassVar = {"messages": [], "tools": None, "chat_template_kwargs": None}

    def read(self, body: bytes, terms: Terms) -> tuple[ChatRequest, list[Prompt]]:
        if len(body) > ROOM_FOR_OPTIONS and b"truncate_prompt_tokens" not in body:
            self._check_size(body, terms)
        return super().read(body, terms)

    def _check_size(self, body: bytes, terms: Terms) -> None:
        """Refuse what is too long for every model, without decoding it."""
        room = {name: self.texts[name].tokenizer.max_token_bytes * b.prompt_tokens for name, b in terms.bounds.items()}
        largest = max(room, key=room.__getitem__)
        if len(body) > MAX_SPELLING * room[largest] + ROOM_FOR_OPTIONS:
            raise terms.bounds[largest].too_long("messages")

    def check(self, asked: ChatRequest) -> None:
        top = asked.top_logprobs
        require(not top or bool(asked.logprobs), "top_logprobs", "needs logprobs to be true")
        RANGES["logprobs"].check("top_logprobs", top)

    def prompts(self, asked: ChatRequest, text: ModelText, bounds: Bounds, semantic: bool) -> list[Prompt]:
        with BlamedOn("messages", bounds):
            prompt, form = render_chat(text, asked)
            ids = text.tokenizer.encode(prompt, add_special_tokens=False, at_most=bounds.prompt_tokens)
            return [Prompt(ids, similar=similar_chat(asked) if semantic else None, form=form)]


def render_chat(text: ModelText, asked: ChatRequest) -> tuple[str, OutputForm | None]:
    """The prompt of a chat, and how to read the answer to it."""
    return read_form(asked, text, _render(text, asked, shown_tools(asked)))


def count_chat(text: ModelText, asked: ChatRequest, bounds: Bounds) -> int:
    """Tokens of a prompt that need not fit."""
    bounds = bounds._replace(prompt_tokens=bounds.countable)
    with BlamedOn("messages", bounds):
        prompt, _ = render_chat(text, asked)
        return len(text.tokenizer.encode(prompt, add_special_tokens=False, at_most=bounds.prompt_tokens))


def tokenize_chat(text: ModelText, body: TokenizeRequest, at_most: int) -> list[int]:
    """Render the conversation and encode it; special tokens come from the template."""
    return text.tokenizer.encode(_render(text, body, body.tools), add_special_tokens=False, at_most=at_most)


def _render(text: ModelText, body: ChatRequest | TokenizeRequest, tools: list[dict[str, Any]] | None) -> str:
    messages = body.messages or []
    for position, message in enumerate(messages):
        if message.role not in ROLES:
            param = f"messages[{position}].role"
            raise InvalidRequest(f"{param} must be one of {', '.join(ROLES)}", param=param)
    variables = dict(body.chat_template_kwargs or {})
    if reserved := variables and sorted(RESERVED_NAMES & variables.keys()):
        raise InvalidRequest(f"chat_template_kwargs must not set {reserved[0]}", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    continued = bool(body.continue_final_message)
    require(
        not (continued and body.add_generation_prompt),
        "add_generation_prompt",
        "must be false with continue_final_message: the last message is itself the beginning of the answer",
    )
    add_prompt = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    tokenizer = text.tokenizer

    def render(said: list[dict[str, Any]]) -> str:
        return text.template.render(
            said,
            tools=tools,
            add_generation_prompt=add_prompt,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            **variables,
        )

    said = msgspec.to_builtins(messages)
    return _cut_after_last_message(said, render) if continued else render(said)


def _cut_after_last_message(said: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> str:
    """Without what the template puts after a finished message, so that the model goes on writing it."""
    marked, _, behind = render([*said[:-1], _with_end(said[-1])]).rpartition(END_OF_TEXT)
    if not marked:
        raise InvalidRequest(
            "continue_final_message cannot find the last message in what the chat template made of it",
            param="continue_final_message",
        )
    return marked if render(said) == marked + behind else marked.rstrip()  # the mark kept it from stripping


def _with_end(message: dict[str, Any]) -> dict[str, Any]:
    """With a mark where its text ends."""
    content = message.get("content")
    parts = [{"text": content}] if isinstance(content, str) else content or []
    require(
        message["role"] == "assistant" and any((part.get("text") or "").strip() for part in parts),
        "continue_final_message",
        "needs a last message of the assistant with text",
    )
    if isinstance(content, str):
        return {**message, "content": content + END_OF_TEXT}
    last = {**parts[-1], "text": (parts[-1].get("text") or "") + END_OF_TEXT}
    return {**message, "content": [*parts[:-1], last]}


class ChatAnswer(ChunkedAnswer[ChatRequest]):
    __slots__ = ()

    id_prefix = "chatcmpl-"

    async def whole(self) -> ChatCompletion:
        body, choices = self.body, self.generation.choices
        answer = ChatCompletion(
            id=self.id,
            created=self.created,
            model=body.model,
            choices=[await self._choice(choice) for choice in choices],
            usage=self.generation.reported_usage(),
            service_tier=self.tier,
        )
        if body.prompt_logprobs is not None:
            entries, top = choices[0].prompt_logprobs or [], body.prompt_logprobs
            answer.prompt_logprobs = await shaped(entries, lambda some: prompt_logprobs(self.tokenizer, some, top))
        if body.return_token_ids:
            answer.prompt_token_ids = choices[0].prompt.token_ids
        return answer

    async def _choice(self, choice: Choice) -> ChatChoice:
        assert choice.finish_reason is not None
        body, tokenizer = self.body, self.tokenizer
        by_id = bool(body.return_tokens_as_token_ids)
        logprobs = None
        if body.logprobs:
            content = await shaped(choice.logprobs, lambda some: chat_logprobs(tokenizer, some, by_id).content)
            logprobs = ChatLogprobs(content)
        token_ids = choice.token_ids if body.return_token_ids else UNSET
        return ChatChoice(
            choice.index, _message(choice.stream), logprobs, _finish_reason(choice), choice.stop_reason, token_ids
        )

    def emitter(self, usage_so_far: Callable[[], Usage | UnsetType | None]) -> Emit:
        body, response = self.body, self.response
        completion_id, created, model, tier = self.id, self.created, body.model, self.tier
        tokenizer, by_id = self.tokenizer, bool(body.return_tokens_as_token_ids)
        with_ids = bool(body.return_token_ids)

        def one(choice: ChatChunkChoice, prompt: Sequence[int] | UnsetType = UNSET) -> bytes:
            return event(ChatChunk(completion_id, created, model, [choice], usage_so_far(), tier, prompt))

        def opening(choice: Choice) -> bytes:
            choice.opened = True
            form = choice.prompt.form
            content = "" if form is None or form.tools is None else None  # there may be calls only
            prompt = choice.prompt.token_ids if with_ids else UNSET
            return one(ChatChunkChoice(choice.index, ChatDelta("assistant", content)), prompt)

        def several(choice: Choice, delta: TextDelta) -> bytes:
            token_ids = delta.token_ids if with_ids else UNSET
            logprobs = chat_logprobs(tokenizer, delta.logprobs, by_id) if delta.logprobs else None
            events = b""
            for part in _deltas(delta, always=bool(logprobs or token_ids)):
                events += one(ChatChunkChoice(choice.index, part, logprobs, token_ids=token_ids))
                logprobs, token_ids = None, UNSET  # with the first
            return events

        async def emit(choice: Choice, delta: TextDelta) -> None:
            events = b"" if choice.opened else opening(choice)
            if delta.logprobs or delta.reasoning or delta.calls or with_ids or not delta.text:
                events += several(choice, delta)
            else:  # by far most deltas
                events += one(ChatChunkChoice(choice.index, ChatDelta(content=delta.text)))
            if delta.finish_reason is not None:
                reason = _finish_reason(choice)
                events += one(ChatChunkChoice(choice.index, ChatDelta(), None, reason, delta.stop_matched))
            if events:
                await response.send_events(events)

        return emit

    def last_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(self.id, self.created, self.body.model, [], usage, self.tier)


def _message(stream: TextStream) -> ChatMessage:
    calls = [MessageToolCall(call.id, FunctionText(call.name, call.arguments)) for call in stream.calls]
    content, reasoning = stream.text, stream.reasoning
    return ChatMessage(
        "assistant",
        None if calls and not content else content,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _finish_reason(choice: Choice) -> ChatFinishReason:
    assert choice.finish_reason is not None
    return "tool_calls" if choice.stream.called and choice.finish_reason == "stop" else choice.finish_reason


def _deltas(delta: TextDelta, always: bool) -> list[ChatDelta]:
    """What a chunk adds, each kind in a delta of its own. `always`: at least one, though it may be empty."""
    deltas = []
    if delta.reasoning:
        deltas.append(ChatDelta(reasoning_content=delta.reasoning))
    if delta.text:
        deltas.append(ChatDelta(content=delta.text))
    if delta.calls:
        deltas.append(ChatDelta(tool_calls=_call_deltas(delta.calls)))
    return deltas or [ChatDelta()] * always


def _call_deltas(calls: Sequence[CallDelta]) -> list[ToolCallDelta]:
    """One for each call that got longer."""
    deltas: list[ToolCallDelta] = []
    for call in calls:
        if call.id:
            function = FunctionDelta(call.arguments, call.name)
            deltas.append(ToolCallDelta(call.index, function, call.id, "function"))
        elif deltas:
            deltas[-1].function.arguments += call.arguments
        else:
            deltas.append(ToolCallDelta(call.index, FunctionDelta(call.arguments)))
    return deltas


class ChatCompletions(TextEndpoint[ChatRequest]):
    endpoint = "/v1/chat/completions"
    prompt_param = "messages"
    reader_type = ChatReader
    answer_type = ChatAnswer

    def wanted(self, body: ChatRequest) -> Wanted:
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return Wanted(param, getattr(body, param), logprobs, body.prompt_logprobs)
