"""Work for a started peer: over HTTP, or over the pipes of a runner script for a library without a server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

from peers.cases import Case
from peers.process import PeerError, PeerProcess
from penstock.bench.measure import Summary, Timeline, summarise
from penstock.bench.prompts import PROBE_WORDS, Calibration, probe_prompt, words_prompt
from penstock.bench.serve import Load, measure, plan
from penstock.bench.server import Call, Server, connect
from penstock.bench.workloads import Job
from penstock.checkpoint.source import BUILT_IN
from penstock.client.http import HttpClient
from penstock.core.errors import PenstockError

START_SECONDS = 900.0
POLL_SECONDS = 0.02
ANSWER_SECONDS = 1800.0  # for one run of a workload


class Session(Protocol):
    cold_start: float  # seconds from the start of the process to its first token

    async def measure(self, case: Case, seed: int) -> Summary: ...

    async def close(self) -> None: ...


class HttpSession:
    def __init__(self, server: Server, cold_start: float) -> None:
        self.cold_start = cold_start
        self._server = server

    @classmethod
    async def open(cls, peer: PeerProcess, port: int, seed: int) -> HttpSession:
        http = HttpClient(f"http://127.0.0.1:{port}", timeout=ANSWER_SECONDS)
        first = await _first_token(peer, Server(http, BUILT_IN))
        try:
            return cls(await connect(http, BUILT_IN, chat=False, seed=seed), first - peer.started)
        except PenstockError as error:
            raise PeerError(f"{error.message}; see {peer.log}") from error

    async def measure(self, case: Case, seed: int) -> Summary:
        return (await measure(self._server, case.workload, load_of(case, seed))).summary

    async def close(self) -> None:
        await self._server.http.close()


async def _first_token(peer: PeerProcess, server: Server) -> float:
    """Ask until an answer comes; when its first token came."""
    while time.perf_counter() < peer.started + START_SECONDS:
        timeline = await server.complete(Call("The penstock feeds the", Job([], 2)))
        if timeline.error is None:
            return timeline.token_times[0]
        peer.check_alive()
        await asyncio.sleep(POLL_SECONDS)
    raise PeerError(f"no token within {START_SECONDS:g} s; see {peer.log}")


class PipeSession:
    """One line of JSON per run each way; `inprocess.py` is the other end."""

    def __init__(self, peer: PeerProcess, cold_start: float) -> None:
        self.cold_start = cold_start
        self._peer = peer
        self._calibration = Calibration()

    @classmethod
    async def open(cls, peer: PeerProcess, seed: int) -> PipeSession:
        await _read_line(peer, START_SECONDS)  # it has generated a token
        session = cls(peer, time.perf_counter() - peer.started)
        counts = []
        for words in PROBE_WORDS:
            timelines, _ = await session._generate([probe_prompt(words, seed)], [2], 1)
            counts.append(timelines[0].prompt_tokens)
        session._calibration = Calibration.from_counts(counts)
        return session

    async def measure(self, case: Case, seed: int) -> Summary:
        jobs = plan(case.workload, load_of(case, seed))
        prompts = [words_prompt(job.prompt, self._calibration) for job in jobs]
        timelines, wall_s = await self._generate(prompts, [job.output_len for job in jobs], case.clients)
        return summarise(timelines, wall_s)

    async def _generate(
        self, prompts: Sequence[str], output_lens: Sequence[int], clients: int
    ) -> tuple[list[Timeline], float]:
        request = {"prompts": prompts, "output_lens": output_lens, "clients": clients}
        assert self._peer.process.stdin is not None
        self._peer.process.stdin.write(json.dumps(request).encode() + b"\n")
        answer = await _read_line(self._peer, ANSWER_SECONDS)
        return [Timeline(**timeline) for timeline in answer["timelines"]], answer["wall_s"]

    async def close(self) -> None:
        assert self._peer.process.stdin is not None
        self._peer.process.stdin.close()  # its end of input


async def _read_line(peer: PeerProcess, seconds: float) -> Any:
    assert peer.process.stdout is not None
    try:
        async with asyncio.timeout(seconds):
            line = await peer.process.stdout.readline()
    except TimeoutError as error:
        raise PeerError(f"no answer within {seconds:g} s; see {peer.log}") from error
    if not line:
        raise PeerError(f"it ended early; see {peer.log}")
    return json.loads(line)


def load_of(case: Case, seed: int) -> Load:
    return Load(seed, concurrency=case.clients, requests=case.requests)
