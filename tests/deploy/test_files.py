"""The other files in deploy/: each against the schema or the linter of its kind, and against what Penstock has."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import re
import shutil
import sys
import tomllib
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from penstock.cli.main import make_parser
from penstock.cli.requirements import check_requirements
from penstock.fleet.fleet import Fleet
from penstock.fleet.metrics import FleetMetrics
from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.observability.metrics import GatewayMetrics
from penstock.settings import Settings, settings_from_mapping
from tests.deploy.manifests import DEPLOY, ROOT, check, compose_schema, read, run, tool
from tests.deploy.test_chart import EVERYTHING, render

COMPOSE = DEPLOY / "compose"
METRIC = re.compile(r"\bpenstock_[a-z0-9_]+\b")


def parse(arguments: list[str]) -> None:
    """The arguments of `penstock`, which must be known to it."""
    make_parser().parse_args(arguments)


# -- Docker ------------------------------------------------------------------------------------------------------------


def test_the_dockerfile_is_clean() -> None:
    run(tool("hadolint"), "--failure-threshold", "info", str(DEPLOY / "Dockerfile"))


def test_what_is_copied_into_the_image_is_in_the_build_context() -> None:
    """The ignore file lets through what a build needs: all that COPY names from the context, and nothing heavy."""
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    let_through = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert ignore[0] == "*"
    text = (DEPLOY / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, flags=re.M) for name in line.split()}
    assert copied == let_through
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_installs_what_the_project_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    printed = run(sys.executable, str(DEPLOY / "requirements.py"), "serve", "cuda", cwd=ROOT).splitlines()
    extras = project["optional-dependencies"]
    assert printed == [*project["dependencies"], *extras["serve"], *extras["cuda"]]
    for extra in re.findall(r"requirements\.py ([a-z ]+) >", (DEPLOY / "Dockerfile").read_text()):
        assert set(extra.split()) <= set(extras)


def test_the_image_asks_for_its_health_without_a_key() -> None:
    (path,) = re.findall(r"HEALTHCHECK.*?127\.0\.0\.1:8000(/\w+)'", (DEPLOY / "Dockerfile").read_text(), flags=re.S)
    assert path in {endpoint.path for endpoint in ENDPOINTS if endpoint.access == "public"}
    assert Settings().server.port == 8000


# -- Compose -----------------------------------------------------------------------------------------------------------


def environment_filled_in(text: str) -> str:
    return re.sub(r"\$\{\w+:\?[^}]*\}", "correct-horse", text)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """With their merge keys resolved, as Compose does."""
    found: dict[str, Any] = yaml.safe_load(environment_filled_in((COMPOSE / "compose.yaml").read_text()))["services"]
    return found


@pytest.mark.parametrize("name", ["compose.yaml", "cuda.yaml"])
def test_compose_files_follow_the_specification(name: str) -> None:
    jsonschema.validate(yaml.safe_load(environment_filled_in((COMPOSE / name).read_text())), compose_schema())


def test_compose_mounts_what_there_is(services: dict[str, Any]) -> None:
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (COMPOSE / source).is_file()


def test_compose_starts_what_penstock_knows(services: dict[str, Any]) -> None:
    settings = settings_from_mapping(yaml.safe_load((COMPOSE / "settings.yaml").read_text()))
    worker = settings_from_mapping(yaml.safe_load((COMPOSE / "worker.yaml").read_text()))
    (config,) = settings.models.values()
    name, _, port = config.workers[0].removeprefix("dns://").partition(":")
    assert services[name]["command"][-1] == f"0.0.0.0:{port}"
    assert list(settings.models) == [worker.model]
    for service in ("gateway", "worker"):
        parse(services[service]["command"])
        grace = int(services[service]["stop_grace_period"].removesuffix("s"))
        assert grace > settings.server.drain_seconds
        assert "PENSTOCK_WORKER_SECRET" in services[service]["environment"]
    assert settings.state is not None
    assert settings.state.startswith("redis://redis:")
    assert "redis" in services
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", []))


def test_prometheus_scrapes_the_gateway(services: dict[str, Any], tmp_path: Path) -> None:
    (job,) = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"]
    (target,) = job["dns_sd_configs"]
    assert target["names"] == ["gateway"]
    mounted = {volume.split(":")[-2]: volume for volume in services["prometheus"]["volumes"]}
    assert mounted[job["authorization"]["credentials_file"]].startswith("${PENSTOCK_ADMIN_KEY_FILE:-/dev/null}:")
    assert target["port"] == Settings().server.port
    if shutil.which("promtool"):
        here = tmp_path / "prometheus.yaml"  # where there is such a file
        text = (COMPOSE / "prometheus.yaml").read_text()
        here.write_text(text.replace(job["authorization"]["credentials_file"], "/dev/null"))
        run("promtool", "check", "config", str(here))


# -- Ray ---------------------------------------------------------------------------------------------------------------


def test_kuberay_manifests_are_valid() -> None:
    manifests = read(DEPLOY / "ray" / "kuberay.yaml")
    for manifest in manifests:
        check(manifest)
    config, cluster, service = manifests
    settings = settings_from_mapping(yaml.safe_load(config["data"]["settings.yaml"]))
    check_requirements(settings, "ray")
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    pods = [groups[name]["template"] for name in ("gateway", "more-gateways")]
    for pod in pods:
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    launching, elsewhere = (
        int(pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1]) for pod in pods
    )
    assert pods[0]["spec"]["terminationGracePeriodSeconds"] >= settings.server.drain_seconds + launching + 10
    assert pods[1]["spec"]["terminationGracePeriodSeconds"] > elsewhere > settings.server.drain_seconds
    assert 1 + groups["more-gateways"]["replicas"] == settings.ray.gateways
    (given,) = re.findall("--resources='(.+?)'", pods[1]["spec"]["containers"][0]["args"][0])
    assert json.loads(given) == settings.ray.gateway_resources.custom
    assert f"rayproject/ray:{cluster['spec']['rayVersion']}-" in (DEPLOY / "Dockerfile").read_text()


def test_the_settings_for_ray_are_valid() -> None:
    settings_from_mapping(yaml.safe_load((DEPLOY / "ray" / "settings.yaml").read_text()))


def test_the_ray_cluster_file_follows_rays_schema() -> None:
    spec = importlib.util.find_spec("ray")  # without importing it
    if spec is None or spec.origin is None:
        pytest.skip("Ray is not installed")
    schema = json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(yaml.safe_load((DEPLOY / "ray" / "cluster.yaml").read_text()), schema)


# -- systemd -----------------------------------------------------------------------------------------------------------


def unit(path: Path) -> RawConfigParser:
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(path)
    return parser


def test_the_unit_starts_what_penstock_knows_and_lets_it_drain() -> None:
    service = unit(DEPLOY / "systemd" / "penstock.service")["Service"]
    assert float(service["TimeoutStopSec"]) > Settings().server.drain_seconds + 10
    assert service["KillMode"] == "mixed", "workers end when the gateway has drained"
    overridden = unit(DEPLOY / "systemd" / "penstock.service.d" / "worker.conf")["Service"]
    for command in (service["ExecStartPre"], service["ExecStart"], overridden["ExecStart"]):
        program, *arguments = command.split()
        assert program == "/opt/penstock/bin/penstock"
        parse(arguments)


def test_keys_are_made_where_the_unit_looks_for_them() -> None:
    """The command in the docs: as the unit's user, with its state folder and its variables."""
    (command,) = re.findall(r"^systemd-run (.+?)\n```", (ROOT / "docs" / "deployment.md").read_text(), re.M | re.S)
    options, program, arguments = command.replace("\\\n", "").partition(" /opt/penstock/bin/penstock ")
    assert program
    parse(arguments.split())
    service = unit(DEPLOY / "systemd" / "penstock.service")["Service"]
    given = dict(each.split("=", 1) for each in re.findall(r"-p (\S+)", options))
    assert given == {name: service[name] for name in given}
    assert {"DynamicUser", "User", "StateDirectory", "EnvironmentFile"} <= set(given)
    (variable,) = re.findall(r"-E (\S+)", options)
    assert variable.replace("/var/lib", "%S") in service["Environment"].split()


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    for source in (DEPLOY / "systemd").rglob("*.*"):
        if source.is_file():
            copy = tmp_path / source.relative_to(DEPLOY / "systemd")
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(source.read_text().replace("/opt/penstock/bin/penstock", "/bin/true"))
    environ = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    done = run(analyze, "verify", "--man=no", "--recursive-errors=no", str(tmp_path / "penstock.service"), env=environ)
    assert not done


# -- metrics -----------------------------------------------------------------------------------------------------------


async def exported() -> set[str]:
    """The names of all samples that a gateway exports, whether or not there is one yet."""
    collectors = [GatewayMetrics({}), FleetMetrics([Fleet("m")])]
    families = [family for collector in collectors for family in collector.collect()]
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
    return {family.name + suffix for family in families for suffix in suffixes.get(family.type, ("",))}


async def test_metrics_that_are_named_in_deploy_are_exported(tmp_path: Path) -> None:
    known = await exported()
    named = {
        name
        for path in DEPLOY.rglob("*")
        if path.is_file() and not fnmatch.fnmatch(path.name, "*.md")
        for name in METRIC.findall(path.read_text())
    }
    assert named
    assert named <= known
    promql_parser = pytest.importorskip("promql_parser")
    for manifest in render(EVERYTHING, tmp_path):
        for trigger in manifest.get("spec", {}).get("triggers", []):
            query = trigger["metadata"]["query"]
            promql_parser.parse(query)
            assert set(METRIC.findall(query)) <= known
