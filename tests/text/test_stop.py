from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.text.stop import StopStrings
from tests.text.tiny_vocabulary import seeded

stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def first_complete(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop string to become complete ends, and which it is; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def safe_length(text: str, stops: list[str]) -> int:
    """How much of a text without a match cannot become part of one."""
    begun = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return len(text) - max(begun, default=0)


@seeded
@given(chunks=st.lists(st.text("abc", max_size=6)), stops=stop_lists, include=st.booleans())
def test_stream_is_cut_as_a_search_in_the_whole_text_would(chunks: list[str], stops: list[str], include: bool) -> None:
    watch = StopStrings(stops, include=include)
    seen = shown = ""
    for chunk in chunks:
        released, found = watch.push(chunk)
        seen += chunk
        shown += released
        match = first_complete(seen, stops)
        if match is None:
            assert not found
            assert shown == seen[: safe_length(seen, stops)]
        else:
            end, stop = match
            assert found
            assert watch.matched == stop
            assert shown == seen[: end if include else end - len(stop)]
    held = watch.finish()
    assert held == "" if watch.matched else shown + held == seen


def test_a_long_repetitive_stop_string_stays_linear() -> None:
    size = 20_000
    watch = StopStrings(["a" * size + "b"])
    assert watch.push("a" * (2 * size)) == ("a" * size, False)  # quadratic work would be 10^8 comparisons
    assert watch.push("b") == ("", True)
