"""The parts of `benchmarks/cpu_peers.py` that need no peer: what is compared, and how it is added up."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import cpu_peers  # noqa: E402
from peers.cases import CASES  # noqa: E402
from peers.process import PeerError, cpu_list, descendants, running  # noqa: E402
from peers.sessions import PipeSession  # noqa: E402
from peers.systems import SLOTS, LlamaCpp, OpenVino, Penstock, System, all_systems  # noqa: E402
from peers.tables import advantages, medians  # noqa: E402
from peers.workshop import InstallError, Workshop  # noqa: E402

CASE = {case.name: case for case in CASES}

# A runner whose "model" emits a token per step for every prompt, in steps of one batch.
RUNNER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from inprocess import Timeline, serve

def load():
    print("a library's banner on standard output")
    def generate(prompts, output_lens, clients):
        return [
            Timeline(0.0, len(prompt.split()) + 1, n, [0.5 + i for i in range(n)], 0.5 + n)
            for prompt, n in zip(prompts, output_lens)
        ]
    return generate

serve(load)
"""


def test_ratios_are_taken_within_a_round_and_above_one_is_better() -> None:
    # The machine runs at half speed in the second round; the ratio must not see it.
    own = [{"single": 200.0, "cold": 2.0}, {"single": 100.0, "cold": 4.0}]
    other = [{"single": 100.0, "cold": 1.0}, {"single": 50.0, "cold": 2.0}]
    assert advantages(own, other) == {"single": 2.0, "cold": 0.5}


def test_a_failed_round_leaves_the_others() -> None:
    own = [{"single": 10.0}, {"single": 30.0}, {"single": 20.0}]
    other: list[dict[str, float]] = [{}, {"single": 10.0}, {"single": 5.0}]
    assert advantages(own, other) == {"single": 3.5}
    assert medians(other) == {"single": 7.5}


def test_llama_cpp_slots_hold_the_longest_request(tmp_path: Path) -> None:
    launches = LlamaCpp(Workshop(tmp_path), "Q8_0").launches(CASES)
    assert sorted(case.name for launch in launches for case in launch.cases) == sorted(CASE)
    for launch in launches:
        slots, context = (int(launch.command[launch.command.index(flag) + 1]) for flag in ("--parallel", "-c"))
        assert all(SLOTS.get(case.name, case.clients) == slots for case in launch.cases)
        assert all(case.longest < context // slots for case in launch.cases)


@pytest.mark.parametrize("amx", [True, False])
def test_llama_cpp_is_built_for_what_the_machine_executes(tmp_path: Path, amx: bool) -> None:
    shop = Workshop(tmp_path)
    cmake = shop.python.with_name("cmake")
    cmake.parent.mkdir(parents=True)
    cmake.write_text("#!/bin/sh\n")
    cmake.chmod(0o755)
    system = LlamaCpp(shop, "Q8_0", amx)
    system._build()
    folder = Path(system.launches(CASES)[0].command[0]).parents[1].name
    configure, build = (line.split() for line in shop.log.read_text().splitlines() if line)
    assert folder in configure
    assert folder in build
    assert ("-DGGML_NATIVE=ON" in configure) is amx
    assert ("-DGGML_AVX512_VNNI=ON" in configure) is not amx
    assert not [option for option in configure if "AMX" in option]


def test_where_amx_kills_peers_do_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    systems = {type(system): system for system in all_systems(tmp_path, "")}
    assert "without-amx" in systems[LlamaCpp].launches(CASES)[0].command[0]
    assert systems[OpenVino].launches(CASES)[0].environment == {"OV_CPU_MAX_ISA": "AVX512_CORE_FP16"}


def test_systems_are_chosen_by_the_beginning_of_their_name(tmp_path: Path) -> None:
    systems: list[System] = [
        Penstock("Penstock", []),
        *(LlamaCpp(Workshop(tmp_path), name) for name in ("Q8_0", "Q4_0")),
    ]
    chosen = cpu_peers.chosen(systems, ["llama.cpp"], ["llama.cpp q4"])
    assert [system.name for system in chosen] == ["llama.cpp Q8_0"]
    with pytest.raises(SystemExit, match="'sglang'"):
        cpu_peers.chosen(systems, ["sglang"], [])


def test_installation_goes_on_where_it_stopped(tmp_path: Path) -> None:
    shop, ran = Workshop(tmp_path), []
    shop.once("first", lambda: ran.append("first"))
    with pytest.raises(InstallError, match=r"install\.log"):
        shop.once("second", lambda: shop.run("sh", "-c", "echo no compiler; exit 3"))
    assert "no compiler" in shop.log.read_text()
    again = Workshop(tmp_path)
    for step in ("first", "second"):
        again.once(step, lambda step=step: ran.append(step))  # type: ignore[misc]
    assert ran == ["first", "second"]


async def test_runner_is_driven_over_its_pipes(tmp_path: Path) -> None:
    script = tmp_path / "runner.py"
    script.write_text(RUNNER)
    command = [sys.executable, str(script), str(BENCHMARKS / "peers")]
    async with running(command, {}, tmp_path / "log", pipe=True) as peer:
        session = await PipeSession.open(peer, seed=1)
        case = CASE["cpu_clients8"]
        summary = await session.measure(case, seed=2)
        assert peer.resident_bytes() > 1 << 20
        await session.close()
    assert cpu_peers.fault_of(summary, case, 2) is None
    assert cpu_peers.fault_of(summary, case.shortened(), 2) is not None
    assert summary.prompt_tokens == case.requests * 128  # the runner's extra token per prompt is calibrated away
    assert case.figures(summary)["gap8"] == pytest.approx(1000.0)


async def test_a_peer_that_dies_is_an_error_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(PeerError, match="log"):
        async with running(command, {}, tmp_path / "log", pipe=True) as peer:
            await asyncio.wait_for(PipeSession.open(peer, seed=1), 60)
    assert "no such model" in (tmp_path / "log").read_text()


def test_descendants_are_found_whatever_their_order() -> None:
    assert descendants(10, {12: 11, 11: 10, 10: 1, 20: 1, 13: 12}) == {10, 11, 12, 13}


def test_cpu_list_joins_neighbours() -> None:
    assert cpu_list({0, 1, 4, 6, 7}) == "0-1,4,6-7"
