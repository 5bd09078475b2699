"""RFC 9112 at the HTTP server itself: what servers behind each other could read differently is refused, and neither
meaning nor limits depend on the packets in which bytes arrive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.http.connection import CHUNK_FRAMING, MAX_FRAMING, MAX_HEAD
from tests.gateway.http.library import MAX_BODY, exchange

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

REFUSED = {
    "obsolete line folding": GET + b"a: b\r\n c\r\n\r\n",
    "obsolete line folding by a tab": GET + b"a: b\r\n\tc\r\n\r\n",
    "space before the first header": b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\nHost: x\n\n",
    "bare LF at the end": b"GET / HTTP/1.1\r\nHost: x\r\n\n",
    "bare CR": b"GET / HTTP/1.1\r\nHost: x\ra: b\r\n\r\n",
    "CR at the end": GET + b"\rX",
    "space before a colon": b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
    "space in a name": GET + b"a b: c\r\n\r\n",
    "NUL in a name": GET + b"a\0: c\r\n\r\n",
    "NUL in a value": GET + b"a: b\0c\r\n\r\n",
    "no name": GET + b": c\r\n\r\n",
    "no colon": GET + b"abc\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"Host: x\r\n\r\n",
    "two hosts, HTTP/1.0": b"GET / HTTP/1.0\r\nHost: x\r\nHost: x\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/1.2": GET.replace(b"1.1", b"1.2") + b"\r\n",
    "HTTP/1.10": GET.replace(b"1.1", b"1.10") + b"\r\n",
    "HTTP/2.0": GET.replace(b"1.1", b"2.0") + b"\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tabs in the request line": GET.replace(b" / ", b"\t/\t") + b"\r\n",
    "space before the method": b" " + GET + b"\r\n",
    "space after the version": GET.replace(b"1.1", b"1.1 ") + b"\r\n",
    "space in the target": GET.replace(b" / ", b" /a b ") + b"\r\n",
    "control character in the target": GET.replace(b" / ", b" /\x01 ") + b"\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "two different lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
    "list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "length with a sign": POST + b"Content-Length: +2\r\n\r\n{}",
    "negative length": POST + b"Content-Length: -2\r\n\r\n{}",
    "hexadecimal length": POST + b"Content-Length: 0x2\r\n\r\n{}",
    "length with an underscore": POST + b"Content-Length: 1_0\r\n\r\n0123456789",
    "length with another white space": POST + b"Content-Length: \x0b2\r\n\r\n{}",
    "empty length": POST + b"Content-Length: \r\n\r\n{}",
    "length of more than 64 bits": POST + b"Content-Length: 18446744073709551618\r\n\r\n{}",
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "chunks in the middle": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunks twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunks twice, apart": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "gzip and chunks apart": POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "empty coding": POST + b"Transfer-Encoding:\r\n\r\n0\r\n\r\n",
    "coding after another white space": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "coding before a space": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "chunk size with a prefix": CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
    "chunk size with a sign": CHUNKED + b"+2\r\n{}\r\n0\r\n\r\n",
    "negative chunk size": CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
    "chunk size with an underscore": CHUNKED + b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n",
    "space before a chunk size": CHUNKED + b" 2\r\n{}\r\n0\r\n\r\n",
    "space after a chunk size": CHUNKED + b"2 \r\n{}\r\n0\r\n\r\n",
    "no chunk size": CHUNKED + b"\r\n{}\r\n0\r\n\r\n",
    "chunk size of more than 64 bits": CHUNKED + b"10000000000000002\r\n{}\r\n0\r\n\r\n",
    "chunk longer than its size": CHUNKED + b"1\r\n{}\r\n0\r\n\r\n",
    "chunk shorter than its size": CHUNKED + b"3\r\n{}\r\n0\r\n\r\n",
    "bare LF after a chunk size": CHUNKED + b"2\n{}\r\n0\r\n\r\n",
    "bare LF after a chunk": CHUNKED + b"2\r\n{}\n0\r\n\r\n",
    "bare LF in a chunk extension": CHUNKED + b"2;a\nb\r\n{}\r\n0\r\n\r\n",
    "NUL in a chunk extension": CHUNKED + b"2;\0\r\n{}\r\n0\r\n\r\n",
    "bare LF after the last chunk": CHUNKED + b"0\n\n",
    "bare LF at the end of chunks": CHUNKED + b"0\r\n\n",
    "bare LF after a trailer": CHUNKED + b"0\r\nx: y\n\r\n",
    "folded trailer": CHUNKED + b"0\r\nx: y\r\n z\r\n\r\n",
    "length in a trailer": CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n",
    "coding in a trailer": CHUNKED + b"0\r\nTransfer-Encoding: chunked\r\n\r\n",
}
UNSUPPORTED = {
    "gzip": POST + b"Transfer-Encoding: gzip\r\n\r\n",
    "gzip and chunks": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "chunks with a parameter": POST + b"Transfer-Encoding: chunked;a=b\r\n\r\n0\r\n\r\n",
    "chunks in quotes": POST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "nearly chunks": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks, HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n",
}
UNDERSTOOD = {
    "empty lines before": b"\r\n\r\n" + GET + b"\r\n",
    "body of a GET": GET + b"Content-Length: 3\r\n\r\nabc",
    "body that looks like a request": POST + b"Content-Length: %d\r\n\r\n%b" % (len(GET) + 2, GET + b"\r\n"),
    "empty lines in a chunk": CHUNKED + b"8\r\n\r\n\r\n\r\n\r\n\r\n0\r\n\r\n",
    "chunk extension": CHUNKED + b'2;a="b"\r\n{}\r\n0\r\n\r\n',
    "leading zeros": CHUNKED + b"002\r\n{}\r\n000\r\n\r\n",
    "trailers": CHUNKED + b"2\r\n{}\r\n0\r\nHost: evil\r\nAuthorization: Bearer evil\r\n\r\n",
    "bytes above ASCII in a value": GET + b"a: \xff\r\n\r\n",
    "offer of another protocol": POST + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\n{}",
}
NEXT = GET.replace(b" / ", b" /next ") + b"\r\n"


def bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


@pytest.mark.parametrize("name", [*REFUSED, *UNSUPPORTED])
def test_what_could_be_read_in_two_ways_is_refused(name: str) -> None:
    """With what follows on the connection, however it is cut."""
    data = (REFUSED | UNSUPPORTED)[name] + NEXT
    for packets in ([data], bytewise(data)):
        found = exchange(packets)
        assert (found.statuses, found.requests) == ([400 if name in REFUSED else 501], [])
        assert found.closed


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_what_is_unusual_but_clear_is_understood(name: str) -> None:
    data = UNDERSTOOD[name] + NEXT
    found = exchange([data])
    assert found.statuses == [200, 200]
    assert [path for _, path, _, _, _ in found.requests] == ["/", "/next"]
    assert not any(b"evil" in value for request in found.requests for _, value in request[3])
    assert exchange(bytewise(data)) == found


def in_packets(data: bytes, cuts: list[int]) -> list[bytes]:
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@st.composite
def cut_traffic(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """Requests of all kinds one after another, and the same bytes in packets."""
    samples = [*REFUSED.values(), *UNSUPPORTED.values(), *UNDERSTOOD.values(), POST + b"Content-Length: 2000\r\n\r\n"]
    understood = draw(st.lists(st.sampled_from([*UNDERSTOOD.values()]), max_size=3))
    data = b"".join(understood) + draw(st.sampled_from(samples)) + NEXT
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=12)))
    return data, in_packets(data, cuts)


@given(cut_traffic())
def test_meaning_does_not_depend_on_packets(traffic: tuple[bytes, list[bytes]]) -> None:
    data, packets = traffic
    assert exchange(packets) == exchange([data])


@st.composite
def around(draw: st.DrawFn, limit: int) -> tuple[int, list[int]]:
    """A size near a limit, and where what has that size is cut, mostly near its end."""
    size = limit + draw(st.integers(-3, 3))
    cuts = draw(st.sets(st.integers(0, size) | st.integers(limit - 8, limit + 8), max_size=5))
    return size, sorted(cut for cut in cuts if cut < size)


@given(around(MAX_HEAD), st.sampled_from([b"", NEXT]))
def test_the_limit_of_a_head_does_not_depend_on_packets(case: tuple[int, list[int]], following: bytes) -> None:
    size, cuts = case
    head = GET + b"a: %b\r\n\r\n" % (b"x" * (size - len(GET) - 7))
    expected = [431] if size > MAX_HEAD else [200, 200] if following else [200]
    assert exchange(in_packets(head + following, cuts)).statuses == expected


@given(around(MAX_BODY), st.booleans())
def test_the_limit_of_a_body_does_not_depend_on_packets(case: tuple[int, list[int]], chunked: bool) -> None:
    size, cuts = case
    body = b"x" * size
    head = CHUNKED if chunked else POST + b"Content-Length: %d\r\n\r\n" % size
    data = head + (b"%x\r\n%b\r\n0\r\n\r\n" % (size, body) if chunked else body)
    packets = in_packets(data, [len(head) + cut for cut in cuts])
    assert exchange(packets).statuses == [413 if size > MAX_BODY else 200]


FRAMING: dict[str, Callable[[int], bytes]] = {
    "chunk extension": lambda size: b"2;a=%b\r\n{}\r\n0\r\n\r\n" % (b"x" * size),
    "trailer": lambda size: b"0\r\na: %b\r\n\r\n" % (b"x" * size),
    "trailers": lambda size: b"2\r\n{}\r\n0\r\n%b\r\n" % (b"a: bc\r\n" * (size // 7)),
}


@pytest.mark.parametrize("packet", [100, 2**20])
@pytest.mark.parametrize("name", FRAMING)
def test_what_is_no_content_of_a_chunked_body_is_limited(name: str, packet: int) -> None:
    for size, expected in ((MAX_FRAMING - CHUNK_FRAMING, 200), (MAX_FRAMING + 4 * CHUNK_FRAMING, 431)):
        data = CHUNKED + FRAMING[name](size)
        found = exchange(data[i : i + packet] for i in range(0, len(data), packet))
        assert (found.statuses, found.closed) == ([expected], expected != 200)
