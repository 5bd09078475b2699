"""What parsers of tool calls have in common. They read text as it arrives, and how it is divided changes nothing."""

from __future__ import annotations

import random
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

ID_LENGTH = 9  # letters and digits, which is the only form that Mistral's templates accept
_ALPHABET = string.ascii_letters + string.digits

State = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a model may call."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)  # JSON schema
    strict: bool = False  # arguments must match the schema, also where the model need not call anything


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call. The first one has the id and the name; the arguments of all of them together are JSON."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


Piece = str | CallDelta  # of an answer: content, or some of a call


class ToolParser(ABC):
    """Divides a text into content and calls.

    A parser is a state machine over the text that no state has consumed yet. White space beside calls is dropped, and
    what looks like a call but cannot be read as one is content. A call whose arguments stop being JSON stays a call
    with these arguments, because its beginning may have been sent.
    """

    markers: ClassVar[tuple[str, ...]]  # texts of the format that may be special tokens, which no other text contains

    def __init__(self, functions: Sequence[Function], most_calls: int | None = None) -> None:
        self.functions = {function.name: function for function in functions}
        self.calls = 0
        self.full = False  # another call has begun than `most_calls` allows: nothing more is to be read
        self._most_calls = most_calls
        self._text = ""  # not consumed
        self._space = ""  # of the content: dropped if a call follows
        self._after_call = False
        self._pieces: list[Piece] = []
        self._state: State = self._first_state()

    def feed(self, text: str) -> list[Piece]:
        """What is certain now, in its order."""
        self._text += text
        while not self.full and self._text and self._state():
            pass
        return self._drain()

    def finish(self) -> list[Piece]:
        """The rest, since the text has ended."""
        if not self.full:
            self._end()
            self._say(self._text)
            if not self._after_call:
                self._pieces.append(self._space)
        self._text = self._space = ""
        return self._drain()

    @abstractmethod
    def _first_state(self) -> State:
        """A state consumes some of `_text` or moves on to another state. It returns whether it did either."""

    @abstractmethod
    def _end(self) -> None:
        """The text ends in the present state: say what was held back."""

    def _drain(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # ------------------------------------------------------------ what states use

    def _go(self, state: State) -> bool:
        self._state = state
        return True

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _skip_space(self) -> str:
        return self._take(len(self._text) - len(self._text.lstrip()))

    def _say(self, text: str) -> None:
        """Content, without white space at its end until more follows."""
        if self._after_call:
            text = text.lstrip()
        if not text:
            return
        self._after_call = False
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._pieces.append(shown)

    def _say_until(self, *markers: str) -> str | None:
        """Say what comes before the first marker, and take that out. None: there is none yet."""
        places = [(at, marker) for marker in markers if (at := self._text.find(marker)) >= 0]
        if places:
            at, marker = min(places)
            self._say(self._take(at))
            self._take(len(marker))
            return marker
        self._say(self._take(len(self._text) - possible_beginning(self._text, markers)))
        return None

    def _starts_with(self, expected: str) -> bool | None:
        """None: what has come may become it."""
        if self._text.startswith(expected):
            return True
        return None if expected.startswith(self._text) else False

    def _begin(self, name: str) -> None:
        """A call. The space before it is of no interest."""
        if self._most_calls is not None and self.calls >= self._most_calls:
            self.full = True
            return
        self._space, self._after_call = "", True
        self.calls += 1
        self._pieces.append(CallDelta(self.calls - 1, "".join(random.choices(_ALPHABET, k=ID_LENGTH)), name))

    def _add(self, arguments: str) -> None:
        """To the call that was begun last."""
        if arguments and not self.full:
            self._pieces.append(CallDelta(self.calls - 1, arguments=arguments))


def possible_beginning(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a marker."""
    longest = min(max(map(len, markers)) - 1, len(text))
    for count in range(longest, 0, -1):
        end = text[-count:]
        if any(marker.startswith(end) for marker in markers):
            return count
    return 0
