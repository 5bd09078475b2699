"""Renders the messages of a chat into a prompt, with the chat template of the model."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from penstock.core.errors import InvalidRequest, StartupError
from penstock.text.messages import Message, as_parts, normalize, shape_calls, spell_out_tools

if TYPE_CHECKING:
    from penstock.text.template_sandbox import CompiledTemplate


class ChatTemplate:
    """A model's Jinja template, compiled at its first use; some models have another for chats with tools."""

    def __init__(self, source: str | None, for_tools: str | None = None) -> None:
        self._source = source
        self._for_tools = None if for_tools is None else ChatTemplate(for_tools)

    def render(
        self,
        messages: list[Message],
        /,
        *,
        tools: list[Message] | None = None,
        add_generation_prompt: bool = True,
        bos_token: str = "",
        eos_token: str = "",
        **template_kwargs: Any,
    ) -> str:
        """The prompt, special tokens included. `template_kwargs` are further variables, such as `enable_thinking`; a
        caller that passes on those of a request must refuse `RESERVED_NAMES` first."""
        if tools and self._for_tools is not None:
            return self._for_tools.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                bos_token=bos_token,
                eos_token=eos_token,
                **template_kwargs,
            )
        try:
            from penstock.text.template_sandbox import RESERVED_NAMES, TemplateRefusal
        except ModuleNotFoundError as error:
            raise StartupError(f"chat templates need {error.name}: pip install {error.name}") from error
        if reserved := template_kwargs and sorted(RESERVED_NAMES & template_kwargs.keys()):
            raise InvalidRequest(f"chat_template_kwargs must not set {reserved[0]}", param="chat_template_kwargs")
        template = self._compiled
        variables = {
            "documents": None,
            **template_kwargs,
            "messages": self._conversation(messages, tools or []),
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": bos_token,
            "eos_token": eos_token,
        }
        try:
            return template.render(variables)
        except TemplateRefusal as refusal:
            raise InvalidRequest(f"the model's chat template refuses: {refusal}", param="messages") from refusal
        except Exception as error:  # a template can raise whatever Python can
            _raise_if_of_machine(error)
            param = "chat_template_kwargs" if template_kwargs else "messages"
            raise InvalidRequest(f"the model's chat template failed: {error}", param=param) from error

    @property
    def knows_tools(self) -> bool:
        """Whether it describes tools to the model itself; also if it does not compile, which says nothing of that."""
        if self._for_tools is not None:
            return self._for_tools.knows_tools
        try:
            return self._compiled.knows_tools
        except InvalidRequest:
            return True

    def _conversation(self, messages: list[Message], tools: list[Message]) -> list[Message]:
        template = self._compiled
        conversation = normalize(messages, keep_parts=template.reads_parts, keep_developer=template.knows_developer)
        if not template.knows_tools:
            conversation = spell_out_tools(conversation, tools)
        elif any(message.get("tool_calls") for message in conversation):
            long_ids, text, objects = template.call_shape
            conversation = [shape_calls(m, long_ids=long_ids, text=text, objects=objects) for m in conversation]
        return conversation if template.reads_strings else [as_parts(message) for message in conversation]

    @cached_property
    def _compiled(self) -> CompiledTemplate:
        from penstock.text.template_sandbox import CompiledTemplate

        if self._source is None:
            raise InvalidRequest(
                "this model has no chat template; send its prompt as text to /v1/completions", param="messages"
            )
        try:
            return CompiledTemplate(self._source)
        except Exception as error:
            _raise_if_of_machine(error)
            raise InvalidRequest(
                f"this model's chat template does not compile ({error}); send its prompt as text to /v1/completions",
                param="messages",
            ) from error


def _raise_if_of_machine(error: BaseException) -> None:
    """Not everything that fails in a template is its fault: Jinja and Python load modules when they first need them,
    which fails where no file can be opened any more."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            raise cause
        cause = cause.__cause__ or cause.__context__
