"""Grammars compiled by llguidance for the built-in model's vocabulary."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable
from datetime import date, datetime
from datetime import time as clock_time
from itertools import product
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from penstock.bench.schemas import SCHEMAS, compact, instances_with_faults
from penstock.core.errors import InvalidRequest, StartupError
from penstock.core.request import MAX_GRAMMAR_BYTES, Grammar
from penstock.grammar import compiler
from penstock.grammar.compiler import LLGuidance
from penstock.grammar.matcher import LLGuidanceMatcher
from penstock.text.tokenizer import Tokenizer
from tests.grammar.masks import Validator, accepts, allowed, schema, walk

OPEN = {"additionalProperties": True}
STRING = re.compile(r'"(\\.|[^"\\])*"')


def test_what_was_compiled_is_known(tokenizer: Tokenizer) -> None:
    grammars, wanted = LLGuidance(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_ids), Grammar("regex", "a+")
    assert not grammars.is_compiled(wanted)
    grammars.compile(wanted)
    assert grammars.is_compiled(wanted)
    assert not grammars.is_compiled(Grammar("lark", "a+"))


def test_nothing_is_forced_before_the_text_where_the_tokenizer_puts_a_space() -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    spaced = Tokenizer(backend, eos_ids=(len(tokens) - 1,))
    matcher = LLGuidance(lambda: spaced, len(tokens), spaced.eos_ids).matcher(Grammar("regex", "yes[0-9]"))
    assert spaced.decode(matcher.take_forced()) == "yes"


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_jsonschema_says(grammars: LLGuidance, tokenizer: Tokenizer, name: str) -> None:
    """Outputs are valid, and what is not valid cannot come out."""
    draw, grammar = random.Random(name), schema(SCHEMAS[name])
    judge = Validator(SCHEMAS[name], format_checker=Validator.FORMAT_CHECKER)
    for _ in range(4):
        if (text := walk(grammars, grammar, tokenizer, draw)) is None:
            continue
        judge.validate(json.loads(text))
        assert not re.search(r"\s", STRING.sub("", text)), "blanks between the parts"
        faults = instances_with_faults(json.loads(text))
        for fault in draw.sample(faults, min(10, len(faults))):
            if accepts(grammars, grammar, tokenizer, compact(fault)):
                judge.validate(fault)


def _nested(levels: int) -> dict[str, Any]:
    return {"properties": {"a": _nested(levels - 1)}} if levels else {}


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
        ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "object", "propertyNames": {"enum": ["a"], "pattern": "^a"}}, "propertyNames"),
        ({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}, "nsatisfiable"),
        ({"type": "string", "format": "idn-email"}, "idn-email"),
        ({"type": "string", "format": "iri", "pattern": "^a"}, "iri"),
        ({"type": "number", "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "nsatisfiable"),
        ({"type": "spaghetti"}, "spaghetti"),
        ({"properties": {"a": {"x": {"uniqueItems": True}, "type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "x-guidance"),
        ({"$ref": "#"}, "cannot be enforced"),
        ({"type": "object", "required": ["a"], "minProperties": 3}, "minProperties 3"),
        ({"properties": {"a": {"const": "\x1b"}}, **OPEN}, "control characters"),
        ({"properties": {"a": {"enum": ["b", {"\x01": 1}]}}, **OPEN}, "control characters"),
        ({"properties": {"a": {"pattern": "^a\x01b$"}}, **OPEN}, "control characters"),
        ({"patternProperties": {r"^a\u{1b}": {}}}, "control characters"),
        (_nested(400), "nested too deeply"),
        (False, "object"),
        ([], "object"),
    ],
)
def test_what_cannot_be_enforced_is_refused(grammars: LLGuidance, source: Any, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word) as caught:
        grammars.compile(Grammar("json_schema", json.dumps(source), param="response_format"))
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{"),
        Grammar("json_schema", '{"maximum": NaN}'),
        Grammar("json_schema", '{"maximum": 1e999}'),
        Grammar("regex", "("),
        Grammar("regex", "(?=a)"),
        Grammar("lark", ""),
        Grammar("lark", "garbage"),
        Grammar("lark", "start: undefined"),
        Grammar("lark", 'start: %json {"type": "array", "uniqueItems": true}'),
        Grammar("lark", 'start: %json {"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}'),
        Grammar("lark", "start: start"),
    ],
    ids=lambda grammar: grammar.source,
)
def test_no_grammar(grammars: LLGuidance, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest):
        grammars.compile(grammar)


def _refs(links: int, wrapped: bool = False) -> dict[str, Any]:
    def link(number: int) -> dict[str, Any]:
        ref = {"$ref": f"#/$defs/{number}"}
        return {"allOf": [ref]} if wrapped else ref

    return {"$ref": "#/$defs/0", "$defs": {**{str(i): link(i + 1) for i in range(links)}, str(links): {}}}


def _doubling(levels: int) -> dict[str, Any]:
    level = {f"a{i}": {"properties": {k: {"$ref": f"#/$defs/a{i + 1}"} for k in "lr"}} for i in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**level, f"a{levels}": {"type": "string"}}}


def _conflicts(count: int) -> dict[str, Any]:
    def one(i: int) -> dict[str, Any]:
        return {"anyOf": [{"properties": {f"p{i}{j}": {"const": j}}, "required": [f"p{i}{j}"]} for j in range(4)]}

    return {"allOf": [one(i) for i in range(count)]}


BOMBS = {
    "multiple": schema({"type": "integer", "multipleOf": 99_999_989}),
    "multiples": schema({"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}),
    "multiple in Lark": Grammar("lark", 'start: %json {"type": "integer", "multiple\\u004ff": 99999989}'),
    "references": schema(_refs(3500)),
    "wrapped references": schema(_refs(2500, wrapped=True)),
    "doubling references": schema(_doubling(30)),
    "nested": Grammar("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000),
    "conflicts": schema(_conflicts(12)),
    "properties": schema({"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}),
    "enumeration": schema({"enum": [f"value {i * 7919}" for i in range(6000)]}),
    "items": schema({"type": "array", "items": {"type": "string"}, "minItems": 10**6}),
    "repetitions": Grammar("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "repetition": Grammar("regex", "a{1,1000000}"),
    "stars": Grammar("regex", "(.*a){30}.*.*.*.*.*.*.*.*x.{500}y"),
    "states": Grammar("regex", "(a|b)*a(a|b){2000}"),
    "parentheses": Grammar("regex", "(" * 30_000 + "a" + ")*" * 30_000),
    "rules in parentheses": Grammar("lark", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "GBNF in parentheses": Grammar("lark", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "ambiguous": Grammar("lark", 'start: s\ns: s s | "a" | '),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_bounded(grammars: LLGuidance, tokenizer: Tokenizer, name: str) -> None:
    """Each is refused, or runs: a few tokens of output, or an error of that output alone."""
    try:
        matcher = grammars.matcher(BOMBS[name])
    except InvalidRequest:
        return
    draw = random.Random(name)
    for _ in range(10):
        choices = [t for t in allowed(grammars, matcher, tokenizer.vocab_size) if t not in tokenizer.eos_ids]
        if matcher.error or not choices:
            return
        matcher.follow(draw.choice(choices))


def test_sources_are_limited() -> None:
    with pytest.raises(InvalidRequest, match="128 KiB"):
        Grammar("regex", "ä" * (MAX_GRAMMAR_BYTES // 2 + 1))


def test_a_grammar_is_compiled_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made, own = list[str](), LLGuidance(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    make = own._make

    def counted(grammar: Grammar) -> Any:
        made.append(grammar.source)
        return make(grammar)

    monkeypatch.setattr(own, "_make", counted)
    monkeypatch.setattr(compiler, "MAX_COMPILED", 3)
    for source in ("a", "b", "a", "a", "c", "d", "a", "b"):  # a is used throughout; b is not, and goes
        own.compile(Grammar("regex", source, param=source))
    assert made == ["a", "b", "c", "d", "b"]
    monkeypatch.setattr(compiler, "MAX_COMPILED_BYTES", 10)
    own.compile(Grammar("regex", "x" * 9))
    assert list(own._compiled) == [("regex", "b"), ("regex", "x" * 9)]


Errors = list[tuple[str, str]]  # parameters and messages


class CountingLock:
    """Of an LLGuidance: how often it was held, which each that asks for a grammar does once before it waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held = 0

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.held += 1
        self._lock.release()


def _compiled_by_all(own: LLGuidance, wanted: list[Grammar], monkeypatch: pytest.MonkeyPatch) -> tuple[int, Errors]:
    """How often a grammar was compiled for all that asked while it was, and the errors that they got."""
    made, errors, lock, make = list[str](), Errors(), CountingLock(), own._make
    deadline = time.monotonic() + 60

    def slowly(grammar: Grammar) -> Any:
        made.append(grammar.source)
        while lock.held < len(wanted) and time.monotonic() < deadline:
            time.sleep(0.001)
        return make(grammar)

    def ask(grammar: Grammar) -> None:
        try:
            own.compile(grammar)
        except InvalidRequest as error:
            errors.append((str(error.param), error.message))

    monkeypatch.setattr(own, "_lock", lock)
    monkeypatch.setattr(own, "_make", slowly)
    threads = [threading.Thread(target=ask, args=(grammar,)) for grammar in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    return len(made), errors


def test_a_new_grammar_of_many_choices_is_compiled_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    own = LLGuidance(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    assert _compiled_by_all(own, [Grammar("regex", "[ab]{7}")] * 8, monkeypatch) == (1, [])
    assert own.is_compiled(Grammar("regex", "[ab]{7}"))
    made, errors = _compiled_by_all(own, [Grammar("regex", "(", param=f"p{i % 2}") for i in range(8)], monkeypatch)
    assert made == 1
    assert sorted(param for param, _ in errors) == ["p0"] * 4 + ["p1"] * 4
    assert len({message.removeprefix(param) for param, message in errors}) == 1
    assert not own.is_compiled(Grammar("regex", "("))
    with pytest.raises(InvalidRequest) as again:
        own.compile(Grammar("regex", "(", param="p0"))
    assert ("p0", again.value.message) in errors


def test_one_that_is_interrupted_lets_another_compile(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a program of many threads is not for those that wait."""
    own, lock, interrupted = (
        LLGuidance(lambda: tokenizer, tokenizer.vocab_size, tokenizer.eos_ids),
        CountingLock(),
        list[int](),
    )
    other = threading.Thread(target=own.compile, args=(Grammar("regex", "a+"),))

    def interrupt(work: Callable[[], Any]) -> Any:
        if interrupted:
            return work()
        interrupted.append(1)
        other.start()
        while lock.held < 2:
            time.sleep(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr(own, "_lock", lock)
    monkeypatch.setattr(compiler, "on_deep_stack", interrupt)
    with pytest.raises(KeyboardInterrupt):
        own.compile(Grammar("regex", "a+"))
    other.join(60)
    assert own.is_compiled(Grammar("regex", "a+"))


def test_free_until_the_tokens_that_end_it(grammars: LLGuidance, tokenizer: Tokenizer) -> None:
    """Such as </think>: anything may come before, but no end."""
    marker = tuple(tokenizer.encode("</think>", add_special_tokens=False))
    matcher = grammars.matcher(Grammar("regex", "yes|no", after=marker))
    free = allowed(grammars, matcher, tokenizer.vocab_size)
    assert len(free) == tokenizer.vocab_size - len(tokenizer.eos_ids)
    assert not set(free) & set(tokenizer.eos_ids)
    matcher.consume(tokenizer.encode("yes maybe <", add_special_tokens=False))
    matcher.consume([*marker[:-1], marker[0]])
    assert matcher.free
    assert matcher.take(tokenizer.eos_ids[0]) is None
    assert matcher.take_forced() == []
    yes = tokenizer.encode("yes", add_special_tokens=False)
    matcher.consume([*marker, *yes[:1]])
    assert not matcher.free
    assert matcher.ended == (len(yes) == 1)
    with pytest.raises(InvalidRequest):
        grammars.matcher(Grammar("regex", "yes|no", after=marker)).consume([*marker, marker[0]])


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
MANY = " | ".join(f'"w{number}"' for number in range(2100))


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar("lark", f"root ::= {MANY}", param="guided_grammar"), "max is 2000"),
        (Grammar("json_schema", json.dumps(ENDLESS), param="guided_grammar"), "Too many items"),
    ],
)
def test_what_llguidance_gives_up_on_is_refused(grammars: LLGuidance, grammar: Grammar, problem: str) -> None:
    """As a failure of the engine it would be tried again elsewhere, and count against every replica."""
    with pytest.raises(InvalidRequest, match=problem) as refused:
        grammars.compile(grammar)
    assert refused.value.param == "guided_grammar"


@pytest.mark.parametrize("wanted", [{"const": 2**53 + 1}, {"enum": ["a", {"id": [-(2**60)]}]}])
def test_numbers_that_doubles_do_not_have_are_refused(grammars: LLGuidance, wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"beyond 2\*\*53"):
        grammars.compile(schema({"type": "object", "properties": {"a": wanted}}))
    grammars.compile(schema({"const": 2**53}))
    named = {"properties": {"const": {"type": "integer", "maximum": 2**60}}}
    grammars.compile(schema({"type": "object", **named}))
    grammars.compile(schema({"type": "integer", "maximum": 2**63 - 1}))


def test_a_refused_token_leaves_the_output_where_it_was(grammars: LLGuidance, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(Grammar("regex", "ab*"))
    a, b = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    taken = [matcher.take(token) for token in (b, tokenizer.eos_ids[0], a, a, b)]
    assert taken == [None, None, [], None, []]
    assert not matcher.error
    assert matcher.take(tokenizer.eos_ids[0]) == []


def test_ends_that_are_ignored_come_only_where_nothing_else_may(grammars: LLGuidance, tokenizer: Tokenizer) -> None:
    def both(grammar: Grammar, *texts: str) -> tuple[LLGuidanceMatcher, LLGuidanceMatcher]:
        """Of an output that went on with these, and with the ends ignored."""
        matchers = grammars.matcher(grammar), grammars.matcher(grammar, tokenizer.eos_ids)
        for matcher, text in product(matchers, texts):
            matcher.consume(tokenizer.encode(text, add_special_tokens=False))
        return matchers

    ends = set(tokenizer.eos_ids)
    for plain, ignoring in (both(Grammar("regex", "[ab]*")), both(Grammar("regex", "a*b?"), "a")):
        for matcher in (ignoring, ignoring.copy()):
            wanted = set(allowed(grammars, plain, tokenizer.vocab_size))
            assert wanted & ends
            assert set(allowed(grammars, matcher, tokenizer.vocab_size)) == wanted - ends
            assert [matcher.take(token) for token in ends] == [None] * len(ends)
            assert not matcher.ended
        assert plain.take(tokenizer.eos_ids[0]) == []
    for matcher in both(Grammar("regex", "yes|no"), "no"):
        assert matcher.ended
    some = grammars.matcher(Grammar("regex", "[ab]*"), tokenizer.eos_ids[:1])
    assert ends & set(allowed(grammars, some, tokenizer.vocab_size)) == ends - set(tokenizer.eos_ids[:1])


def test_an_ignored_end_is_the_last_resort() -> None:
    """Where the grammar would go on with what no token spells."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "<end>": 1}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    own = LLGuidance(lambda: Tokenizer(backend, eos_ids=(1,)), 2, (1,))
    matcher = own.matcher(Grammar("regex", "a[ab]{0,2}b?"), (1,))
    for _ in range(3):
        assert allowed(own, matcher, 2) == [0]
        assert matcher.follow(0) == []
    assert not matcher.ended
    assert allowed(own, matcher, 2) == [1]
    assert matcher.take(1) is None
    matcher.follow(1)
    assert matcher.ended


def test_gbnf_and_lark(grammars: LLGuidance, tokenizer: Tokenizer) -> None:
    gbnf = Grammar("lark", 'root ::= "a" [0-9]+ ws "b"?\nws ::= " "*')
    lark = Grammar("lark", 'start: "a" /[0-9]+/ %json {"type": "array", "items": {"type": "integer"}}')
    assert accepts(grammars, gbnf, tokenizer, "a12  b")
    assert not accepts(grammars, gbnf, tokenizer, "a b")
    assert accepts(grammars, lark, tokenizer, "a12[1,2]")
    assert not accepts(grammars, lark, tokenizer, "a12[1, 2]")
    described = Grammar("lark", 'start: %json {"type": "integer", "description": "x ::= y"}')
    assert accepts(grammars, described, tokenizer, "12")
    assert accepts(grammars, Grammar("lark", '# a comment\nroot ::= "a"'), tokenizer, "a")
    empty = Grammar("lark", "start: %json {}")
    assert accepts(grammars, empty, tokenizer, '{"a":1}')


@pytest.mark.parametrize("name", ["date", "time", "date-time"])
def test_dates_exist(grammars: LLGuidance, tokenizer: Tokenizer, name: str) -> None:
    """As Python reads them: leap years, months of 30 days, hours of the day."""
    draw = random.Random(name)
    source = {"properties": {"default": {"type": "string", "format": name}}, "type": "object", "required": ["default"]}
    by_name, pattern = schema(source), schema({"type": "string", "format": name, "pattern": "^[0-9]"})
    read = {"date": date.fromisoformat, "time": clock_time.fromisoformat, "date-time": datetime.fromisoformat}[name]
    days = ["2024-02-29", "2023-02-29", "1900-02-29", "2000-02-29", "2024-06-31", "2024-12-31", "0004-02-29"]
    days += [f"{draw.randrange(1, 3000):04}-{draw.randrange(14):02}-{draw.randrange(28, 33)}" for _ in range(60)]
    clocks = [f"{draw.randrange(26):02}:{draw.randrange(58, 61):02}:{draw.randrange(61):02}Z" for _ in days]
    texts = {"date": days, "time": clocks, "date-time": [f"{d}T{c}" for d, c in zip(days, clocks, strict=True)]}[name]
    outcomes = set()
    for text in texts:
        try:
            read(text)
            exists = True
        except ValueError:
            exists = False
        outcomes.add(exists)
        assert accepts(grammars, pattern, tokenizer, f'"{text}"') is exists, text
        assert accepts(grammars, by_name, tokenizer, f'{{"default":"{text}"}}') is exists, text
    assert outcomes == {True, False}


def test_data_that_looks_like_a_format_stays(grammars: LLGuidance, tokenizer: Tokenizer) -> None:
    grammar = schema({"enum": [{"format": "date"}], "$defs": {"day": {"format": "date"}}})
    assert accepts(grammars, grammar, tokenizer, '{"format":"date"}')


@pytest.mark.parametrize(
    "spelled",
    [r"\u0070ath", r"\u0070\u0061\u0074\u0068", r"pat\u0068", r"a\/b", r"q\u0022", r"\u00fc", r"\u00FC", r"x\u005f1"],
)
def test_no_other_spelling_of_a_key_evades_its_schema(grammars: LLGuidance, tokenizer: Tokenizer, spelled: str) -> None:
    never = {"const": 1}
    names = {"path": never, "a/b": never, 'q"': never, "ü": never}
    source = {"type": "object", "properties": names, "patternProperties": {"^x_": never}, **OPEN}
    for grammar in (schema(source), Grammar("lark", f"start: %json {json.dumps(source)}")):
        assert accepts(grammars, grammar, tokenizer, '{"path":1,"other":2}')
        assert accepts(grammars, grammar, tokenizer, '{"path":1,"\\n":"\\t"}')
        assert not accepts(grammars, grammar, tokenizer, f'{{"{spelled}":2}}')
        assert not accepts(grammars, grammar, tokenizer, f'{{"path":1,"{spelled}":2}}')


def test_control_characters_where_no_key_can_be_spelled_with_them(grammars: LLGuidance, tokenizer: Tokenizer) -> None:
    closed = schema({"properties": {"a": {"type": "string"}}, "additionalProperties": False})
    assert accepts(grammars, closed, tokenizer, r'{"a":"\u001b[1m"}')
    assert accepts(grammars, schema({"const": "\x1b"}), tokenizer, r'"\u001b"')
    class_of_others = schema({"properties": {"a": {"type": "string", "pattern": r"^[^\x00-\x1f]+$"}}, **OPEN})
    assert accepts(grammars, class_of_others, tokenizer, '{"a":"b"}')


def test_exclusive_bounds(grammars: LLGuidance, tokenizer: Tokenizer) -> None:
    """Also of numbers that end before the next integer, and where the bounds come together from several schemas."""
    draw = random.Random(3)
    for _ in range(40):
        low = draw.choice([-3, -1, 0, 0.0, 0.25, 1, 2.0, 10])
        high = draw.choice([low + 0.05, low + 0.5, low + 1, low + 2.5])
        lower, upper = draw.choice(["minimum", "exclusiveMinimum"]), draw.choice(["maximum", "exclusiveMaximum"])
        source: Any = {"type": "number", lower: low, upper: high}
        if draw.random() < 0.3:
            source = {"allOf": [{"type": "number", lower: low}, {upper: high}]}
        judge, grammar = Validator(source), schema(source)
        middle = f"{(low + high) / 2:g}"
        assert accepts(grammars, grammar, tokenizer, middle), (source, middle)
        for text in (f"{low:g}", f"{high:g}", f"{low:g}.0", f"{high:g}.0", "0", "-0", "-0.0", f"{high + 0.01:g}"):
            if text.count(".") < 2 and accepts(grammars, grammar, tokenizer, text):
                judge.validate(json.loads(text))


def test_a_model_without_a_tokenizer() -> None:
    def none() -> Tokenizer:
        raise StartupError("there is no tokenizer.json")

    with pytest.raises(InvalidRequest, match=r"cannot be compiled here: there is no tokenizer\.json"):
        LLGuidance(none, 100, (0,)).compile(Grammar("regex", "a"))
