"""Tool calls and reasoning through the real OpenAI client, against an engine that says what models of a family say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pydantic
import pytest

from penstock.core.request import GenerateRequest
from penstock.fleet.settings import ModelConfig
from penstock.settings import Settings
from penstock.simulation.scripted_engine import MODEL, hang, says
from penstock.text.tokenizer import Tokenizer
from tests.families import family
from tests.gateway.conftest import Gateway, serving

HI: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
STRICT: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
PING: Any = {"type": "function", "function": {"name": "ping"}}
BONN = '{"city": "Bonn"}'
CALLED = f'<tool_call>\n{{"name": "weather", "arguments": {BONN}}}\n</tool_call>'
ANSWERS = {  # of a family that calls both
    "hermes": f'Sure.\n{CALLED}\n<tool_call>\n{{"name": "ping"}}\n</tool_call>',
    "mistral": f'Sure.[TOOL_CALLS][{{"name": "weather", "arguments": {BONN}}}, {{"name": "ping", "arguments": {{}}}}]',
    "llama3": f'<|python_tag|>{{"name": "weather", "parameters": {BONN}}}; {{"name": "ping", "parameters": {{}}}}',
    "qwen3_coder": (
        "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
    ),
    "deepseek": (
        "</think>\n\nSure.<｜tool▁calls▁begin｜>"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{BONN}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}


@contextmanager
def of_family(plain: Tokenizer, name: str, settings: Settings | None = None, **options: Any) -> Iterator[Gateway]:
    with serving(family(plain, name), settings, **options) as gateway:
        yield gateway


@pytest.fixture
def qwen(tokenizer: Tokenizer) -> Iterator[Gateway]:
    """A model that reasons unless it is told not to, and calls in the Hermes format."""
    with of_family(tokenizer, "hermes") as gateway:
        yield gateway


def ask(gateway: Gateway, **fields: Any) -> Any:
    return gateway.client().chat.completions.create(**{"model": MODEL, "messages": HI, **fields})


def streamed(gateway: Gateway, **fields: Any) -> Any:
    """The final completion as the client's own helper puts it together."""
    with gateway.client().chat.completions.stream(**{"model": MODEL, "messages": HI, **fields}) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


def prompt_of(gateway: Gateway) -> str:
    return gateway.tokenizer.decode(gateway.engine.requests[-1].prompt, skip_special_tokens=False)


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_of_every_family_whole_and_streamed(tokenizer: Tokenizer, name: str) -> None:
    with of_family(tokenizer, name) as gateway:
        gateway.answers(ANSWERS[name])
        for answer in (ask(gateway, tools=[WEATHER, PING]), streamed(gateway, tools=[WEATHER, PING])):
            (choice,) = answer.choices
            assert calls_of(choice) == [("weather", {"city": "Bonn"}), ("ping", {})]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == (None if name == "llama3" else "Sure.")
            assert len({call.id for call in choice.message.tool_calls}) == 2
            assert {call.type for call in choice.message.tool_calls} == {"function"}
        with gateway.http() as http:
            card = http.get("/v1/models").json()["data"][0]
        thinks = name in ("hermes", "deepseek")
        assert (card["tool_parser"], card["reasoning_parser"]) == (name, "think" if thinks else None)


def test_streamed_deltas_have_the_shape_of_openai(gateway: Gateway) -> None:
    gateway.answers(f"Well.\n{CALLED}")
    deltas = [chunk.choices[0].delta for chunk in ask(gateway, tools=[WEATHER], stream=True)]
    assert (deltas[0].role, deltas[0].content, deltas[0].tool_calls) == ("assistant", None, None)
    assert "".join(delta.content or "" for delta in deltas) == "Well."
    first, *more = [call for delta in deltas for call in delta.tool_calls or []]
    assert (first.index, first.type, first.function.name) == (0, "function", "weather")
    assert first.id
    assert len(more) > 2, "arguments come while they are written"
    assert all((call.index, call.id, call.type, call.function.name) == (0, None, None, None) for call in more)
    assert first.function.arguments + "".join(call.function.arguments for call in more) == BONN


def test_a_text_that_calls_nothing_is_as_without_tools(gateway: Gateway) -> None:
    for answer in (ask(gateway, tools=[WEATHER]), streamed(gateway, tools=[WEATHER])):
        (choice,) = answer.choices
        assert (choice.message.content, choice.message.tool_calls) == ("Hello there, friend!", None)
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize("fields", [{"tool_choice": "none", "tools": [WEATHER]}, {}])
def test_calls_nobody_asked_for_are_content(gateway: Gateway, fields: Any) -> None:
    gateway.answers(CALLED)
    (choice,) = ask(gateway, **fields).choices
    assert (choice.message.content, choice.finish_reason) == (CALLED, "stop")


def test_choices_have_their_own_calls_and_logprobs_of_all_tokens(gateway: Gateway) -> None:
    gateway.answers(CALLED, "No.")
    tokens = [len(ids) for ids in says(gateway.tokenizer, CALLED, "No.")]
    for answer in (
        ask(gateway, tools=[WEATHER], n=2, logprobs=True),
        streamed(gateway, tools=[WEATHER], n=2, logprobs=True, stream_options={"include_usage": True}),
    ):
        assert [calls_of(choice) for choice in answer.choices] == [[("weather", {"city": "Bonn"})], []]
        assert [choice.message.content for choice in answer.choices] == [None, "No."]
        assert [len(choice.logprobs.content) for choice in answer.choices] == tokens
        assert answer.usage.completion_tokens == sum(tokens)


def test_a_call_that_was_cut_off_says_so(gateway: Gateway) -> None:
    gateway.answers(CALLED)
    (choice,) = ask(gateway, tools=[WEATHER], max_tokens=len(says(gateway.tokenizer, CALLED)[0]) - 12).choices
    assert choice.finish_reason == "length"
    assert BONN.startswith(choice.message.tool_calls[0].function.arguments)


def test_the_beginning_of_a_call_that_must_come_is_no_content(gateway: Gateway) -> None:
    """`max_tokens` cuts it off before its name is known."""
    gateway.answers(f"{CALLED}\n{CALLED}")
    first = len(says(gateway.tokenizer, CALLED)[0])
    for count, calls in ((4, []), (first + 4, [("weather", {"city": "Bonn"})])):
        fields: Any = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": count}
        (choice,) = ask(gateway, **fields).choices
        assert (choice.finish_reason, calls_of(choice)) == ("length", calls)
        assert not choice.message.content
        deltas = [chunk.choices[0].delta for chunk in ask(gateway, **fields, stream=True)]
        assert not any(delta.content for delta in deltas)


@pytest.mark.parametrize("stop", ["\n", ",", "}", "<"])
def test_stop_strings_do_not_cut_calls_off_that_must_come(gateway: Gateway, stop: str) -> None:
    gateway.answers(CALLED)
    for answer in (
        ask(gateway, tools=[WEATHER], tool_choice="required", stop=[stop]),
        streamed(gateway, tools=[WEATHER], tool_choice="required", stop=[stop]),
    ):
        assert answer.choices[0].finish_reason == "tool_calls"
        assert calls_of(answer.choices[0]) == [("weather", {"city": "Bonn"})]
        assert not answer.choices[0].message.content


def test_a_call_that_a_stop_string_cut_off_is_not_to_be_made(gateway: Gateway) -> None:
    gateway.answers(CALLED)
    cut = ask(gateway, tools=[WEATHER], stop=["}"]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.tool_calls[0].function.arguments == BONN[:-1]
    whole = ask(gateway, tools=[WEATHER], stop=["</tool_call>"])
    assert whole.choices[0].finish_reason == "tool_calls"
    assert calls_of(whole.choices[0]) == [("weather", {"city": "Bonn"})]


def test_one_call_at_most_ends_the_work_at_the_second(gateway: Gateway) -> None:
    (ids,) = says(gateway.tokenizer, f"{CALLED}\n{CALLED}")
    gateway.runs(lambda request: [*([token] for token in ids[:-8]), hang])
    for answer in (
        ask(gateway, tools=[WEATHER], parallel_tool_calls=False),
        streamed(gateway, tools=[WEATHER], parallel_tool_calls=False),
    ):
        assert calls_of(answer.choices[0]) == [("weather", {"city": "Bonn"})]
        assert answer.choices[0].finish_reason == "tool_calls"
    assert all(ended.wait(20) for ended in gateway.engine.ended.values())


@pytest.mark.parametrize("ended", [{"max_tokens": -1}, {"stop": "END"}], ids=["length", "stop"])
@pytest.mark.parametrize("count", [1, 100])
def test_a_second_call_that_is_not_read_ends_the_answer_first(
    gateway: Gateway, ended: dict[str, Any], count: int
) -> None:
    """However many tokens come at once, and whatever would end them."""
    ids = gateway.tokenizer.encode(f"{CALLED}\n{CALLED}END", add_special_tokens=False)
    gateway.runs(lambda request: [ids[start : start + count] for start in range(0, len(ids), count)])
    ended = {name: len(ids) if value == -1 else value for name, value in ended.items()}
    (choice,) = ask(gateway, tools=[WEATHER], parallel_tool_calls=False, **ended).choices
    assert (choice.finish_reason, choice.stop_reason) == ("tool_calls", None)


@pytest.mark.parametrize(
    ("fields", "pieces"),
    [
        ({"tool_choice": "required"}, ['\\"weather\\"', '\\"ping\\"', ")*"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ['\\"weather\\"', '\\"ping\\"']),
        ({"tool_choice": {"type": "function", "function": {"name": "ping"}}}, ['\\"ping\\"']),
        ({"tool_choice": {"function": {"name": "ping"}}}, ['\\"ping\\"']),  # huggingface_hub
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "ping"}}],
                    },
                }
            },
            ['\\"ping\\"', ")*"],
        ),
    ],
)
def test_forced_calls_are_constrained(gateway: Gateway, fields: Any, pieces: list[str]) -> None:
    ask(gateway, tools=[WEATHER, PING], **fields)
    grammar = gateway.engine.requests[0].params.grammar
    assert grammar is not None
    assert grammar.kind == "lark"
    assert [piece for piece in ('\\"weather\\"', '\\"ping\\"', ")*") if piece in grammar.source] == pieces


def test_only_strict_functions_constrain_free_answers(gateway: Gateway) -> None:
    for tool in (WEATHER, STRICT):
        ask(gateway, tools=[tool])
    plain, strict = (request.params.grammar for request in gateway.engine.requests)
    assert plain is None
    assert strict is not None
    assert "TEXT" in strict.source


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no type", {"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ("custom", {"tools": [PING, {"type": "custom", "custom": {"name": "f"}}]}, "tools[1].type"),
    ("no function", {"tools": [{"type": "function"}]}, "tools[0].function"),
    ("no name", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ("spaces", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (
        "schema of a string",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters",
    ),
    (
        "schema no object",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    ("strict", {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
    ("twice", {"tools": [PING, PING]}, "tools"),
    ("required without tools", {"tool_choice": "required"}, "tool_choice"),
    ("unknown choice", {"tools": [PING], "tool_choice": "any"}, "tool_choice"),
    (
        "unknown function",
        {"tools": [PING], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
    ),
    ("no choice", {"tools": [PING], "tool_choice": {}}, "tool_choice"),
    (
        "nothing allowed",
        {"tools": [PING], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice",
    ),
    ("parallel a word", {"tools": [PING], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("fields", "param"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_tools_are_refused_by_name(shared_gateway: Gateway, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(shared_gateway, **fields)
    assert caught.value.param == param


def test_tools_that_do_not_fit_in_an_option_are_read_in_the_other_process(gateway: Gateway) -> None:
    gateway.answers(CALLED)
    gateway.engine.info = type(gateway.engine.info)(MODEL, 100_000, gateway.tokenizer.vocab_size)
    long = {**WEATHER["function"], "description": "rain " * 15_000}
    answer = ask(gateway, tools=[{"type": "function", "function": long}], tool_choice="required", max_tokens=100)
    assert calls_of(answer.choices[0]) == [("weather", {"city": "Bonn"})]
    assert gateway.engine.requests[0].params.grammar is not None


# ---------------------------------------------------------------- reasoning

THOUGHT = "<think>\nThe user says hi.\n</think>\n\nHello!"


def test_reasoning_is_apart_whole_and_streamed(qwen: Gateway) -> None:
    qwen.answers(THOUGHT)
    tokens = len(qwen.tokenizer.encode("<think>\nThe user says hi.\n</think>", add_special_tokens=False))
    whole = ask(qwen)
    chunks = list(ask(qwen, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].message.content == "Hello!"
    assert whole.choices[0].message.reasoning_content == "The user says hi."
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Hello!"
    thoughts = [getattr(delta, "reasoning_content", "") for delta in deltas]
    assert "".join(thoughts) == "The user says hi."
    assert len([thought for thought in thoughts if thought]) > 3, "it is streamed"
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.completion_tokens_details.reasoning_tokens == tokens


def test_reasoning_that_the_prompt_opened(tokenizer: Tokenizer) -> None:
    with of_family(tokenizer, "deepseek") as gateway:
        gateway.answers(THOUGHT.removeprefix("<think>\n"))
        message = ask(gateway).choices[0].message
        assert prompt_of(gateway).endswith("<think>\n")
    assert (message.reasoning_content, message.content) == ("The user says hi.", "Hello!")


def test_reasoning_that_is_turned_off(qwen: Gateway) -> None:
    for fields in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        message = ask(qwen, **fields).choices[0].message
        assert prompt_of(qwen).endswith("<think>\n\n</think>\n\n")
        assert (message.content, hasattr(message, "reasoning_content")) == ("Hello there, friend!", False)


def test_stop_strings_and_logprobs_in_reasoning(qwen: Gateway) -> None:
    """Stop strings are for the answer. Every token is scored, also those that nobody sees."""
    qwen.answers("<think>\nI could stop here.\n</think>\n\nI say stop here.")
    for answer in (ask(qwen, stop=["stop"], logprobs=True), streamed(qwen, stop=["stop"], logprobs=True)):
        (choice,) = answer.choices
        assert (choice.message.reasoning_content, choice.message.content) == ("I could stop here.", "I say ")
        spelled = "".join(entry.token for entry in choice.logprobs.content)
        assert spelled == "<think>\nI could stop here.\n</think>\n\nI say stop", "of the last token the space is shown"


def test_a_cache_looks_for_stop_strings_where_the_answer_is(tokenizer: Tokenizer) -> None:
    with of_family(tokenizer, "hermes", cached=True) as gateway:
        gateway.answers("<think>\nI could stop here.\n</think>\n\nI say stop here.")
        for _ in range(2):
            message = ask(gateway, stop=["stop"], temperature=0).choices[0].message
            assert (message.reasoning_content, message.content) == ("I could stop here.", "I say ")
        assert len(gateway.engine.requests) == 1


def test_calls_after_reasoning_are_constrained_after_it(qwen: Gateway) -> None:
    """The template leaves it to the model to think; where the answer is constrained, it is told to."""
    qwen.answers(f"I need the weather.\n</think>\n\n{CALLED}")
    answer = ask(qwen, tools=[WEATHER], tool_choice="required")
    assert prompt_of(qwen).endswith("<|im_start|>assistant\n<think>\n")
    grammar = qwen.engine.requests[-1].params.grammar
    assert grammar is not None
    assert grammar.after == (qwen.tokenizer.token_id("</think>"),)
    assert answer.choices[0].message.reasoning_content == "I need the weather."
    assert calls_of(answer.choices[0]) == [("weather", {"city": "Bonn"})]
    qwen.answers(CALLED)
    answer = ask(qwen, tools=[WEATHER], tool_choice="required", reasoning_effort="none")
    grammar = qwen.engine.requests[-1].params.grammar
    assert grammar is not None
    assert grammar.after == ()


def test_an_answer_that_the_client_began_is_not_reasoned_about(qwen: Gateway) -> None:
    qwen.answers(" ping")
    begun = [*HI, {"role": "assistant", "content": "Then I call"}]
    continued = {"continue_final_message": True}
    message = ask(qwen, messages=begun, tools=[STRICT], extra_body=continued).choices[0].message
    assert prompt_of(qwen).endswith("Then I call")
    assert message.content == " ping"


def test_reasoning_sent_back_reaches_the_template(qwen: Gateway) -> None:
    for field in ("reasoning_content", "reasoning"):
        ask(qwen, messages=[*HI, {"role": "assistant", "content": "Hello!", field: "They greet."}, *HI])
        assert "<think>\nThey greet.\n</think>\n\nHello!" in prompt_of(qwen)


def test_settings_override_what_the_template_shows(tokenizer: Tokenizer) -> None:
    config = ModelConfig(tool_parser="mistral", reasoning_parser="none")
    with of_family(tokenizer, "hermes", Settings(models={MODEL: config})) as gateway:
        gateway.answers('<think>no</think>[TOOL_CALLS][{"name": "ping"}]')
        (choice,) = ask(gateway, tools=[PING]).choices
    assert (choice.message.content, calls_of(choice)) == ("<think>no</think>", [("ping", {})])


def test_a_model_of_an_unknown_format_cannot_be_forced(tokenizer: Tokenizer) -> None:
    own = "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(family(tokenizer, "hermes", own)) as gateway:
        assert ask(gateway, tools=[PING]).choices[0].message.content == "Hello there, friend!"
        with pytest.raises(openai.BadRequestError, match="format of this model's tool calls is not known"):
            ask(gateway, tools=[PING], tool_choice="required")


def test_a_replayed_answer_is_read_like_the_first(tokenizer: Tokenizer) -> None:
    with of_family(tokenizer, "hermes", cached=True) as gateway:
        gateway.answers(f"<think>\nSo.\n</think>\n\n{CALLED}")
        fields: Any = {"tools": [WEATHER], "temperature": 0}
        first, again, stream = ask(gateway, **fields), ask(gateway, **fields), streamed(gateway, **fields)
        assert len(gateway.engine.requests) == 1
    for answer in (first, again, stream):
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("So.", None)
        assert calls_of(answer.choices[0]) == [("weather", {"city": "Bonn"})]


# ---------------------------------------------------------------- the client's own helpers


class weather(pydantic.BaseModel):
    """Weather of a city."""

    city: str


def test_tools_of_the_parse_helper(gateway: Gateway) -> None:
    gateway.answers(CALLED)
    tool = openai.pydantic_function_tool(weather)
    answer = gateway.client().chat.completions.parse(model=MODEL, messages=HI, tools=[tool])
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == weather(city="Bonn")
    with gateway.client().chat.completions.stream(model=MODEL, messages=HI, tools=[tool]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [weather(city="Bonn")]


def test_a_conversation_goes_on_after_a_call_that_was_cut_off(gateway: Gateway) -> None:
    gateway.answers(CALLED)
    message = ask(gateway, tools=[WEATHER], max_tokens=len(says(gateway.tokenizer, CALLED)[0]) - 12).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "invalid JSON, again"}
    answer = ask(gateway, tools=[WEATHER], messages=[*HI, message, result])
    assert answer.choices[0].message.tool_calls
    assert json.dumps(message.tool_calls[0].function.arguments) in prompt_of(gateway)


def test_a_conversation_goes_on_with_what_the_client_got(gateway: Gateway) -> None:
    """Send the message back as the client has it, with the result."""

    def script(request: GenerateRequest) -> list[Any]:
        called = "rain" in gateway.tokenizer.decode(request.prompt)
        return [[token] for token in says(gateway.tokenizer, "It rains." if called else CALLED)[0]]

    gateway.runs(script)
    message = ask(gateway, tools=[WEATHER]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    answer = ask(gateway, tools=[WEATHER], messages=[*HI, message, result])
    assert answer.choices[0].message.content == "It rains."
    assert f"{CALLED}<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response>" in prompt_of(gateway)
