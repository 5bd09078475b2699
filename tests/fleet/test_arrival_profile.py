"""What usually arrives at each time of the day survives a restart."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.autoscaling.arrivals import Arrivals, Profile
from penstock.autoscaling.settings import AutoscaleConfig
from penstock.fleet.arrival_profile import load_profile, profile_path, save_profile
from penstock.fleet.autoscaler import Autoscaler
from penstock.fleet.fleet import Fleet

PERIOD = 7200.0


def watched() -> Profile:
    """A period with a quiet first and a busy second half."""
    arrivals, work = Arrivals(PERIOD), 0.0
    for step in range(int(PERIOD / 10) + 1):
        arrivals.observe(step * 10.0, work, 20.0)
        work += 10.0 if step * 10 < PERIOD / 2 else 40.0
    return arrivals.profile


def test_growth_is_known_after_a_restart(tmp_path: Path) -> None:
    before, after = watched(), Profile(PERIOD)
    save_profile(before, tmp_path / "state" / "m.json")
    load_profile(after, tmp_path / "state" / "m.json")
    noon = PERIOD + PERIOD / 2
    assert before.growth(noon - 100, noon + 100) == pytest.approx(after.growth(noon - 100, noon + 100), rel=1e-3)
    assert after.growth(noon - 100, noon + 100) == pytest.approx(4.0)


def test_nothing_is_taken_of_another_period(tmp_path: Path) -> None:
    save_profile(watched(), tmp_path / "m.json")
    week = Profile(7 * PERIOD)
    load_profile(week, tmp_path / "m.json")
    assert not any(week.seen)


@pytest.mark.parametrize("content", ["", "{}", '{"version": 1, "period": 7200.0, "seen": [[1.0]]}', "[1]"])
def test_a_damaged_file_is_learnt_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    path, profile = tmp_path / "m.json", Profile(PERIOD)
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        load_profile(profile, path)
    assert not any(profile.seen)
    assert "learnt again" in caplog.text


def test_nothing_seen_leaves_no_file(tmp_path: Path) -> None:
    save_profile(Profile(PERIOD), tmp_path / "m.json")
    assert not list(tmp_path.iterdir())


def test_models_have_names_with_slashes() -> None:
    assert profile_path("org/model").name == "org%2Fmodel.json"


async def test_an_autoscaler_writes_when_it_stops(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    save_profile(watched(), path)
    stored = path.read_text()
    config = AutoscaleConfig(period_seconds=PERIOD)
    autoscaler = Autoscaler(Fleet("m"), config, lambda: pytest.fail("none is asked for"), profile_path=path)
    path.unlink()
    await autoscaler.stop()
    assert path.read_text() == stored
