"""Reads calls that are JSON objects, `{"name": ..., "arguments": {...}}`, while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

SPACE = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}
_BARE = frozenset("+-.0123456789truefalsnE:," + SPACE)  # what may stand outside strings and brackets
_in_string = re.compile(r'[^"\\]*').match


class JsonValue:
    """Finds the end of one JSON value. It does not check the value, beyond brackets and characters that no JSON has."""

    def __init__(self) -> None:
        self.done = False
        self.bad = False
        self._open: list[str] = []  # brackets that are to come
        self._in_string = self._escaped = False

    def scan(self, text: str, start: int = 0) -> int:
        """Where the value ends in this text; its length: not here. Space before the value must have been skipped."""
        at = start
        while at < len(text) and not self.done and not self.bad:
            at = self._scan_string(text, at) if self._in_string else self._scan_bare(text, at)
        return at

    def _scan_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _in_string(text, at)
        assert found is not None  # it matches nothing, too
        at = found.end()
        if at < len(text):
            self._escaped = text[at] == "\\"
            self._in_string = self._escaped
            self.done = not self._in_string and not self._open
            at += 1
        return at

    def _scan_bare(self, text: str, at: int) -> int:
        character = text[at]
        if character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._open.append(_CLOSING[character])
        elif self._open and character == self._open[-1]:
            self._open.pop()
            self.done = not self._open
        elif not self._open and (character in "}],:" or character in SPACE):  # after a number or a word
            self.done = True
            return at
        elif character not in _BARE:
            self.bad = True
            return at
        return at + 1


class JsonCall:
    """One call. `begin` is called with its name as soon as it is known that there are arguments to come or none, `add`
    with their text piece by piece. The keys may come in any order, and arguments also as a JSON text in a string."""

    def __init__(
        self,
        begin: Callable[[str], None],
        add: Callable[[str], None],
        accepts: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._begin = begin
        self._add = add
        self._accepts = accepts
        self.raw = ""  # what was read until it began: the text of what is no call
        self.begun = self.done = self.bad = False
        self._name: str | None = None
        self._arguments: str | None = None  # that came before the name
        self._key = self._part = ""
        self._value: JsonValue | None = None
        self._state = self._open

    def feed(self, text: str) -> str:
        """The rest of the text, which does not belong to the call. There is one only once it is `done` or `bad`."""
        while text and not self.done and not self.bad:
            used = self._state(text)
            if not self.begun:
                self.raw += text[:used]
            text = text[used:]
        return text

    # ------------------------------------------------------------ states: how many characters they consumed

    def _open(self, text: str) -> int:
        self.bad = text[0] != "{"
        self._state = self._before_key
        return 0 if self.bad else 1

    def _before_key(self, text: str) -> int:
        if text[0] in SPACE or text[0] == ",":
            return 1
        if text[0] == "}":
            self._close()
            return 0 if self.bad else 1
        self.bad = text[0] != '"'
        self._state, self._value, self._part = self._in_key, JsonValue(), ""
        return 0

    def _in_key(self, text: str) -> int:
        used = self._scan(text)
        if self._value is not None and self._value.done:
            self._key, self._state = self._string(), self._before_value
        return used

    def _before_value(self, text: str) -> int:
        """Here is a colon, which may have space around it."""
        if text[0] in SPACE or text[0] == ":":
            return 1
        self._value, self._part = JsonValue(), ""
        first = self._arguments is None and not self.begun
        if self._key in ("arguments", "parameters") and text[0] == "{" and first:
            self._state, self._arguments = self._in_arguments, ""
            self._start()
        else:
            self._state = self._in_value
        return 0

    def _in_arguments(self, text: str) -> int:
        assert self._value is not None
        used = self._value.scan(text)
        if self.begun:
            self._add(text[:used])
        else:
            self._arguments = (self._arguments or "") + text[:used]
        self.bad = self.bad or self._value.bad
        if self._value.done:
            self._state = self._before_key
        return used

    def _in_value(self, text: str) -> int:
        used = self._scan(text)
        if self._value is None or not self._value.done:
            return used
        self._state = self._before_key
        if self._key == "name" and self._name is None:
            self._name = self._string()
            if not self.bad:
                self._start()
        elif self._key in ("arguments", "parameters") and self._part.startswith('"'):
            self._arguments = self._string()
            self._start()
        return used

    # ------------------------------------------------------------

    def _scan(self, text: str) -> int:
        assert self._value is not None
        used = self._value.scan(text)
        self._part += text[:used]
        self.bad = self._value.bad or (self._value.done and not self._part)
        return used

    def _string(self) -> str:
        try:
            value: Any = json.loads(self._part, strict=False)
        except ValueError:
            value = None
        self.bad = self.bad or not isinstance(value, str)
        return value if isinstance(value, str) else ""

    def _start(self) -> None:
        """Begin the call, if the name is known and where its arguments are."""
        if self._name is None or self._arguments is None or self.begun:
            return
        if not self._accepts(self._name):
            self.bad = True
            return
        self.begun = True
        self._begin(self._name)
        self._add(self._arguments)

    def _close(self) -> None:
        if not self.begun:
            self._arguments = "{}" if self._arguments is None else self._arguments
            self._start()
        self.done = self.begun
        self.bad = not self.begun
