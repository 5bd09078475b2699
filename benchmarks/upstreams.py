"""Real servers of other kinds as upstreams: what each can do, and what becomes of a request when it dies.

    python benchmarks/upstreams.py --install-only       # once; up to an hour on two cores, 8 GB
    python benchmarks/upstreams.py                      # half an hour; prints what docs/upstreams.md shows

llama.cpp's server, vLLM, Triton and another Penstock, one after the other, each with the built-in model: probed, asked
greedily and with a seed, cancelled, continued, frozen and killed in mid-stream. A server that cannot be installed or
started is reported and left out. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from peers.cases import CASES, Case
from peers.process import PeerError, PeerProcess, end_on_signal, free_port, running
from peers.systems import HERE, ROOT, Launch, System, all_systems
from peers.workshop import InstallError, Workshop

from penstock.bench.report import describe_machine
from penstock.checkpoint.source import BUILT_IN, resolve
from penstock.client.http import HttpClient
from penstock.core import onednn
from penstock.core.errors import PenstockError, Unavailable
from penstock.core.request import Chunk, GenerateRequest, SamplingParams
from penstock.fleet.upstream.capabilities import OPTIONAL_PARAMS
from penstock.fleet.upstream.engine import Upstream
from penstock.fleet.upstream.openai import OpenAIProtocol
from penstock.fleet.upstream.retokenizer import Vocabulary
from penstock.fleet.upstream.settings import UpstreamConfig, UpstreamKind, UpstreamTimeouts
from penstock.text.tokenizer import Tokenizer, load_tokenizer

PEERS_DIR = Path("~/.cache/penstock/peers")
START_SECONDS = 900.0
PYTRITON = "nvidia-pytriton==0.7.0"
DEBIAN_PYTHON = Path("/usr/bin/python3.11")  # Triton's Python backend needs the shared library of its interpreter
TRITON_MODEL = "story"
MAX_MODEL_LEN = 2048
TIMEOUTS = UpstreamTimeouts(next_token=10.0, check=10.0, check_interval=1.0)

PROMPT = "The capital of France is"
EMOJI = "Here are some emoji and their names: 🦊 fox, 🌊 wave, 水 water, "
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=32)
EVERYTHING = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {100: -1.0},
    "seed": 3,
    "min_tokens": 24,
    "stop_token_ids": (2,),
    "ignore_eos": True,
}
LONG = SamplingParams(temperature=0.0, max_tokens=1000)


@dataclass(frozen=True, slots=True)
class TritonServer:
    """PyTriton's, with this checkout's engine as the model inside."""

    workshop: Workshop
    name: str = "Triton (PyTriton 0.7.0)"

    def install(self) -> None:
        shop = self.workshop
        python = DEBIAN_PYTHON if DEBIAN_PYTHON.exists() else Path(sys.executable)
        shop.once("environment", lambda: shop.run(python, "-m", "venv", "--clear", "venv"))
        shop.packages(PYTRITON, "safetensors", "tokenizers", "jinja2")

    def launches(self, cases: Sequence[Case]) -> list[Launch]:
        port, script = free_port(), str(HERE / "run_triton.py")
        command = [str(self.workshop.python), script, str(resolve(BUILT_IN).path), str(port)]
        return [Launch(command, cases, port, {"PYTHONPATH": str(ROOT)})]


@dataclass
class Report:
    """What was found, by server."""

    names: list[str] = field(default_factory=list)
    capabilities: dict[str, dict[str, str]] = field(default_factory=dict)
    checks: dict[str, dict[str, str]] = field(default_factory=dict)
    handovers: list[str] = field(default_factory=list)

    def capability(self, name: str, what: str, value: object) -> None:
        shown = {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
        self.capabilities.setdefault(what, {})[name] = shown

    def check(self, name: str, what: str, result: str) -> None:
        print(f"  {what}: {result}", file=sys.stderr, flush=True)
        self.checks.setdefault(what, {})[name] = result

    def markdown(self) -> str:
        machine = describe_machine()
        return "\n\n".join(
            [
                f"{machine['cpu']}, {machine['cores']} cores; {BUILT_IN}",
                self._table("capability", self.capabilities),
                self._table("check", self.checks),
                *(f"`{line}`" for line in self.handovers),
            ]
        )

    def _table(self, title: str, rows: dict[str, dict[str, str]]) -> str:
        lines = [[title, *self.names], ["---"] * (len(self.names) + 1)]
        lines += [[what, *(by_name.get(name, "") for name in self.names)] for what, by_name in rows.items()]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-dir", type=Path, default=PEERS_DIR, help=f"where servers are installed ({PEERS_DIR})")
    parser.add_argument(
        "--only", default="", metavar="A,B", help="these servers alone, by the beginnings of their names"
    )
    parser.add_argument("--install-only", action="store_true", help="install the servers and ask nothing")
    args = parser.parse_args()
    if line := onednn.cap_onednn():
        print(line, file=sys.stderr)
    peers_dir = args.peers_dir.expanduser()
    wanted = [name.strip().lower() for name in args.only.split(",") if name.strip()]
    ready = [system for system in servers(peers_dir) if chosen(system, wanted) and installed(system)]
    if not args.install_only:
        report = Report()
        asyncio.run(ask_all(ready, peers_dir / "logs", report))
        print(report.markdown())
    return 0


def servers(peers_dir: Path) -> list[System]:
    """Of the peers of the CPU table, one of each kind that is a server."""
    by_name = {system.name: system for system in all_systems(peers_dir, "--kv-memory-gib 1")}
    kinds = ("Penstock", "vLLM", "llama.cpp Q8_0")
    peers = [next(system for name, system in by_name.items() if name.startswith(kind)) for kind in kinds]
    return [*peers, TritonServer(Workshop(peers_dir / "triton"))]


def chosen(system: System, wanted: Sequence[str]) -> bool:
    return not wanted or any(system.name.lower().startswith(name) for name in wanted)


def installed(system: System) -> bool:
    try:
        system.install()
    except (InstallError, PenstockError) as error:
        print(f"{system.name}: SKIPPED, not installed: {error}", file=sys.stderr)
        return False
    return True


async def ask_all(systems: Sequence[System], logs: Path, report: Report) -> None:
    end_on_signal()
    tokenizer = load_tokenizer(resolve(BUILT_IN))
    trials = [Trial(system, tokenizer, logs / f"upstream-{system.name.split()[0]}.log", report) for system in systems]
    for trial in trials:
        print(trial.name, file=sys.stderr, flush=True)
        try:
            await trial.run()
        except (PeerError, PenstockError) as error:
            print(f"{trial.name}: FAILED: {error}", file=sys.stderr, flush=True)
    others = [trial for trial in trials if trial.name.startswith(("vLLM", "llama.cpp"))]
    if len(others) == 2:
        await hand_over(others, report)


async def hand_over(trials: Sequence[Trial], report: Report) -> None:
    """Each of two servers is killed in mid-stream, and the other one goes on."""
    lines = []
    for dying, surviving in (trials, trials[::-1]):
        async with dying.connected() as (first, victim), surviving.connected() as (second, _):
            begun: list[int] = []
            try:
                async for chunk in first.submit(dying.request(PROMPT, GREEDY)):
                    begun += chunk.token_ids
                    if len(begun) == 10:
                        os.killpg(victim.process.pid, signal.SIGKILL)
            except Unavailable as error:
                rest = await surviving.collect(second, PROMPT, GREEDY, output=begun)
                texts = (dying.tokenizer.decode(ids) for ids in (begun, surviving.ids(rest)))
                lines.append(
                    f"{dying.name} killed ({error.message}), {surviving.name} goes on: " + " | ".join(map(repr, texts))
                )
    report.handovers = lines


class Trial:
    """One server through all checks."""

    def __init__(self, system: System, tokenizer: Tokenizer, log: Path, report: Report) -> None:
        self.name, self.tokenizer, self._log, self._report = system.name, tokenizer, log, report
        case = next(case for case in CASES if case.name == "cpu_clients8")
        [self._launch] = system.launches([case])
        self._kind: UpstreamKind = "triton" if isinstance(system, TritonServer) else "openai"
        self._url = f"http://127.0.0.1:{self._launch.port}"

    async def run(self) -> None:
        self._report.names.append(self.name)
        async with self._running() as peer:
            upstream = await self._connect(peer)
            self._describe(upstream)
            await self._answers(upstream)
            await self._continues(upstream)
            await self._cancels(upstream)
            await self._freezes(upstream, peer)
            await self._dies(upstream, peer)
        async with self._running() as peer:
            await self._until(upstream, peer, healthy=True)
            text = self._text(await self.collect(upstream, PROMPT, GREEDY))
            self._check("the same object after the server's restart", bool(text))
        await upstream.close()

    def _running(self) -> AbstractAsyncContextManager[PeerProcess]:
        return running(self._launch.command, self._launch.environment, self._log, pipe=False)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[Upstream, PeerProcess]]:
        async with self._running() as peer:
            upstream = await self._connect(peer)
            try:
                yield upstream, peer
            finally:
                await upstream.close()

    async def _connect(self, peer: PeerProcess) -> Upstream:
        model = TRITON_MODEL if self._kind == "triton" else None
        length = MAX_MODEL_LEN if self._kind == "triton" else None
        config = UpstreamConfig(self._url, kind=self._kind, model=model, max_model_len=length, timeouts=TIMEOUTS)
        while time.perf_counter() < peer.started + START_SECONDS:
            try:
                return await Upstream.connect(config, self.tokenizer)
            except Unavailable:
                peer.check_alive()
                await asyncio.sleep(0.5)
        raise PeerError(f"not ready within {START_SECONDS:g} s; see {peer.log}")

    def _describe(self, upstream: Upstream) -> None:
        found, report = upstream.found, self._report
        for what in ("token_ids_in", "token_ids_out", "logprobs", "seed", "continuation"):
            report.capability(self.name, what, getattr(found.capabilities, what))
        lacking = ", ".join(name for name in OPTIONAL_PARAMS if name not in found.capabilities.params)
        report.capability(self.name, "parameters it does not know", lacking or "none")
        report.capability(self.name, "context", found.max_model_len)

    async def _answers(self, upstream: Upstream) -> None:
        """What comes through is, as text, what the server says if it is asked without us."""
        for what, prompt, params in (
            ("greedy text equal to the server's own", PROMPT, GREEDY),
            ("sampled text equal to the server's own", EMOJI, SEEDED),
        ):
            ours = self._text(await self.collect(upstream, prompt, params))
            self._check(what, ours == await self._direct(upstream, prompt, params))
        known = upstream.capabilities.params
        params = SamplingParams(max_tokens=24, **{name: EVERYTHING[name] for name in known})  # type: ignore[arg-type]
        self._check("all of its parameters at once", bool(await self.collect(upstream, EMOJI, params)))
        greedy = self.ids(await self.collect(upstream, PROMPT, GREEDY))
        if "top_k" in known:
            params = SamplingParams(temperature=1.0, top_k=1, max_tokens=8)
            tokens = self.ids(await self.collect(upstream, PROMPT, params))
            self._check("top_k of 1 is greedy at any temperature", tokens == greedy[:8])
        if "logit_bias" in known:
            params = SamplingParams(temperature=0.0, max_tokens=8, logit_bias={greedy[0]: -100.0})
            tokens = self.ids(await self.collect(upstream, PROMPT, params))
            self._check("logit_bias of -100 bans a token", tokens[0] != greedy[0])
        if upstream.capabilities.token_ids_out:
            params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(greedy[4],))
            tokens = self.ids(await self.collect(upstream, PROMPT, params))
            self._check("ends at a stop token", tokens == greedy[: greedy.index(greedy[4]) + 1])
        if upstream.capabilities.logprobs:
            chunks = await self.collect(upstream, PROMPT, SamplingParams(temperature=0.0, max_tokens=24, logprobs=3))
            scores = [score for chunk in chunks for score in chunk.logprobs or []]
            best = all(score.top and score.top[0] == (score.token_id, score.logprob) for score in scores)
            self._check("greedy tokens are the most probable of their alternatives", best and len(scores) == 24)

    async def _direct(self, upstream: Upstream, prompt: str, params: SamplingParams) -> str:
        async with HttpClient(self._url) as http:
            if self._kind == "triton":
                sampling = {"temperature": params.temperature, **({"seed": 11} if params.seed else {})}
                body = {"text_input": prompt, "max_tokens": params.max_tokens, **sampling}
                async with http.stream("POST", f"/v2/models/{TRITON_MODEL}/generate_stream", body) as response:
                    return "".join([json.loads(event)["text_output"] async for event in response.events()])
            protocol = OpenAIProtocol(UpstreamConfig(self._url), Vocabulary(self.tokenizer))
            request = self.request(prompt, params)
            path, sent = protocol.request(upstream.found, request, params.max_tokens or 1)
            answer = await http.post(path, {**sent, "prompt": prompt, "stream": False, "stream_options": None})
            return str(answer.json()["choices"][0]["text"]).rstrip("\ufffd")

    async def _continues(self, upstream: Upstream) -> None:
        """Greedily, at every token: what another engine emitted, and the rest from here."""
        if not upstream.capabilities.continuation:
            self._report.check(self.name, "continued at every token of a greedy answer", "cannot")
            return
        whole = self.ids(await self.collect(upstream, PROMPT, GREEDY))
        same = 0
        for done in range(1, len(whole)):
            rest = self.ids(await self.collect(upstream, PROMPT, GREEDY, output=whole[:done]))
            same += self.tokenizer.decode(whole[:done] + rest) == self.tokenizer.decode(whole)
        result = f"{same} of {len(whole) - 1} equal"
        self._report.check(self.name, "continued at every token of a greedy answer", result)

    async def _cancels(self, upstream: Upstream) -> None:
        """A server that went on with the cancelled answers would be slower for as long as they last."""
        alone = await self._seconds(upstream, "Alone")
        for number in range(8):
            stream = upstream.submit(self.request(f"{number}. {PROMPT}", LONG))
            await anext(stream)
            await stream.aclose()
        after = await self._seconds(upstream, "After")
        what = "48 tokens: alone, and after 8 long answers were cancelled"
        self._report.check(self.name, what, f"{alone:.2f} s, {after:.2f} s")

    async def _seconds(self, upstream: Upstream, prompt: str) -> float:
        start = time.perf_counter()
        await self.collect(upstream, prompt, SamplingParams(temperature=0.0, max_tokens=48))
        return time.perf_counter() - start

    async def _freezes(self, upstream: Upstream, peer: PeerProcess) -> None:
        problem, seconds = await self._interrupted(upstream, lambda: self._signal(peer, signal.SIGSTOP))
        found = isinstance(problem, Unavailable) and problem.code == "timeout" and not (await upstream.check()).ok
        self._report.check(
            self.name,
            f"frozen in mid-stream (limit {TIMEOUTS.next_token:g} s)",
            f"Unavailable after {seconds:.1f} s" if found else f"NOT FOUND: {problem!r}",
        )
        self._signal(peer, signal.SIGCONT)
        await self._until(upstream, peer, healthy=True)
        self._check("healthy again when it goes on", bool(await self.collect(upstream, PROMPT, GREEDY)))

    async def _dies(self, upstream: Upstream, peer: PeerProcess) -> None:
        problem, seconds = await self._interrupted(upstream, lambda: self._signal(peer, signal.SIGKILL))
        found = isinstance(problem, Unavailable) and not upstream.health().ok
        self._report.check(
            self.name,
            "killed in mid-stream",
            f"Unavailable after {1000 * seconds:.0f} ms" if found else f"NOT FOUND: {problem!r}",
        )

    async def _interrupted(self, upstream: Upstream, act: Callable[[], None]) -> tuple[PenstockError | None, float]:
        """What a stream fails with after its fifth chunk, and how long after that."""
        start = time.perf_counter()
        try:
            async with aclosing(upstream.submit(self.request(PROMPT, LONG))) as stream:
                count = 0
                async for _ in stream:
                    if (count := count + 1) == 5:
                        start = time.perf_counter()
                        act()
        except PenstockError as error:
            return error, time.perf_counter() - start
        return None, time.perf_counter() - start

    @staticmethod
    def _signal(peer: PeerProcess, number: signal.Signals) -> None:
        os.killpg(peer.process.pid, number)

    async def _until(self, upstream: Upstream, peer: PeerProcess, *, healthy: bool) -> None:
        end = time.perf_counter() + START_SECONDS
        while (await upstream.check()).ok != healthy:
            peer.check_alive()
            if time.perf_counter() > end:
                raise PeerError(f"still {upstream.health().detail}; see {peer.log}")
            await asyncio.sleep(0.5)

    def request(self, prompt: str, params: SamplingParams, output: Sequence[int] = ()) -> GenerateRequest:
        prompt_ids = self.tokenizer.encode(prompt)
        return GenerateRequest("r", prompt_ids, params, seed=params.seed or 0, output=output, prefix_scope="team")

    async def collect(
        self, upstream: Upstream, prompt: str, params: SamplingParams, output: Sequence[int] = ()
    ) -> list[Chunk]:
        return [chunk async for chunk in upstream.submit(self.request(prompt, params, output))]

    def ids(self, chunks: Sequence[Chunk]) -> list[int]:
        return [token_id for chunk in chunks for token_id in chunk.token_ids]

    def _text(self, chunks: Sequence[Chunk]) -> str:
        return self.tokenizer.decode(self.ids(chunks)).rstrip("\ufffd")

    def _check(self, what: str, passed: bool) -> None:
        self._report.check(self.name, what, "yes" if passed else "NO")


if __name__ == "__main__":
    sys.exit(main())
