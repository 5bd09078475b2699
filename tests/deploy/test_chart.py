"""The Helm chart, rendered by Helm: valid for Kubernetes, and about things that Penstock has."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.dashboards import RULES, export_to
from penstock.cli.settings import file_and_environment
from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.settings import Settings, settings_from_mapping
from tests.deploy.manifests import DEPLOY, Manifest, check, run, tool
from tests.observability.rule_tests import run_rule_tests

CHART = DEPLOY / "helm" / "penstock"
SMALLEST: dict[str, Any] = {"workerSecret": {"value": "correct-horse"}, "workers": {"smollm2-135m": {}}}
EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.example.com/penstock", "pullSecrets": [{"name": "pull"}]},
    "workerSecret": {"existingSecret": "theirs"},
    "settings": {"server": {"drain_seconds": 90, "processes": 2}, "classes": {"fast": {"ttft_ms": 500, "itl_ms": 100}}},
    "gateway": {
        "autoscaling": {"requestsInFlight": 200},
        "cache": {"existingClaim": "models"},
        "port": 80,
        "environment": [{"name": "PENSTOCK_STATE", "valueFrom": {"secretKeyRef": {"name": "redis", "key": "url"}}}],
        "envFrom": [{"secretRef": {"name": "tokens"}}],
    },
    "workers": {
        "small": {"model": "smollm2-135m", "aliases": ["default"], "autoscaling": {"streams": 0}},
        "qwen2.5-7b": {
            "model": "Qwen/Qwen2.5-7B-Instruct",
            "tag": "cuda",
            "replicas": 1,
            "autoscaling": {"enabled": False},
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "environment": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
            "cache": {"existingClaim": "models"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        },
    },
    "workerDefaults": {"autoscaling": {"enabled": True}, "envFrom": [{"configMapRef": {"name": "proxy"}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}


def render(values: dict[str, Any], folder: Path, release: str = "prod") -> list[Manifest]:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    run(tool("helm"), "lint", "--strict", str(CHART), "--values", str(file))
    text = run(tool("helm"), "template", release, str(CHART), "--namespace", "ml", "--values", str(file))
    return [each for each in yaml.safe_load_all(text) if each]


@pytest.fixture(scope="module", params=[SMALLEST, EVERYTHING], ids=["smallest", "everything"])
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    return render(request.param, tmp_path_factory.mktemp("chart"))


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def settings_of(manifests: list[Manifest]) -> Settings:
    (config,) = of_kind(manifests, "ConfigMap").values()
    return settings_from_mapping(yaml.safe_load(config["data"]["settings.yaml"]))


def containers(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Each with its pod."""
    for deployment in of_kind(manifests, "Deployment").values():
        pod = deployment["spec"]["template"]
        for container in pod["spec"]["containers"]:
            yield pod, container


def test_manifests_are_valid(rendered: list[Manifest]) -> None:
    for manifest in rendered:
        check(manifest)


def test_the_settings_are_valid(rendered: list[Manifest]) -> None:
    settings_of(rendered)
    (config,) = of_kind(rendered, "ConfigMap").values()
    for name, text in config["data"].items():
        settings_from_mapping(yaml.safe_load(text))
        assert name == "settings.yaml" or name.startswith("worker-")


def test_gateways_find_workers_by_their_headless_service(rendered: list[Manifest]) -> None:
    services, deployments = of_kind(rendered, "Service"), of_kind(rendered, "Deployment")
    for config in settings_of(rendered).models.values():
        (address,) = config.workers
        host, _, port = address.removeprefix("dns://").partition(":")
        name, namespace, _ = host.split(".")
        assert namespace == "ml"
        service, template = services[name]["spec"], deployments[name]["spec"]["template"]
        assert service["clusterIP"] == "None"
        assert service["selector"].items() <= template["metadata"]["labels"].items()
        (container,) = template["spec"]["containers"]
        assert container["args"][0] == "worker"
        assert container["args"][-1] == f"0.0.0.0:{port}"
        assert [each["containerPort"] for each in container["ports"]] == [int(port)]
        assert [each["port"] for each in service["ports"]] == [int(port)]


def test_selectors_and_volumes_meet(rendered: list[Manifest]) -> None:
    for deployment in of_kind(rendered, "Deployment").values():
        template = deployment["spec"]["template"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    configs = {name: set(each["data"]) for name, each in of_kind(rendered, "ConfigMap").items()}
    for pod, container in containers(rendered):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        file = Path(next(each for each in container["args"] if each.startswith("/etc/penstock/")))
        assert file.name in configs[volumes["settings"]["configMap"]["name"]]


def test_probes_ask_what_the_gateway_answers_without_a_key(rendered: list[Manifest]) -> None:
    public = {endpoint.path for endpoint in ENDPOINTS if endpoint.access == "public"}
    asked = set()
    for _, container in containers(rendered):
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if "httpGet" in container.get(probe, {}):
                asked.add(container[probe]["httpGet"]["path"])
                assert container[probe]["httpGet"]["port"] == "http"
    assert asked == {"/version", "/health"}
    assert asked <= public


def test_there_is_time_to_drain(rendered: list[Manifest]) -> None:
    (config,) = of_kind(rendered, "ConfigMap").values()
    for pod, container in containers(rendered):
        file = Path(next(each for each in container["args"] if each.startswith("/etc/penstock/")))
        drain = settings_from_mapping(yaml.safe_load(config["data"][file.name])).server.drain_seconds
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert pod["spec"]["terminationGracePeriodSeconds"] >= drain + int(hook[1]) + 10


def test_who_scales_sets_the_count_alone(rendered: list[Manifest]) -> None:
    """A Deployment that names its replicas would undo what an autoscaler did at every upgrade."""
    scaled = {
        each["spec"]["scaleTargetRef"]["name"]
        for kind in ("HorizontalPodAutoscaler", "ScaledObject")
        for each in of_kind(rendered, kind).values()
    }
    for name, deployment in of_kind(rendered, "Deployment").items():
        assert ("replicas" in deployment["spec"]) == (name not in scaled)


def test_a_model_overrides_the_defaults(tmp_path: Path) -> None:
    """Also by values that are empty: false, and 0."""
    manifests = render(EVERYTHING, tmp_path)
    (scaled,) = of_kind(manifests, "ScaledObject").values()
    assert scaled["spec"]["scaleTargetRef"]["name"] == "prod-worker-small"
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert ["penstock_replica_streams" in query for query in queries] == [False, False]
    assert "Secret" not in {each["kind"] for each in manifests}, "an existing one is used"


def test_the_state_comes_from_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL with a password stands in no ConfigMap, and is what `serve` and `keys` in the container read."""
    manifests = render(EVERYTHING, tmp_path)
    for pod, container in containers(manifests):
        names = [each["name"] for each in container["env"]]
        assert len(set(names)) == len(names)
        gateway = pod["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway"
        assert ("PENSTOCK_STATE" in names) == gateway
        assert container["envFrom"] == (EVERYTHING["gateway"] if gateway else EVERYTHING["workerDefaults"])["envFrom"]
    (config,) = of_kind(manifests, "ConfigMap").values()
    file = tmp_path / "settings.yaml"
    file.write_text(config["data"]["settings.yaml"])
    url = "redis://:correct-horse@redis.example.com:6379/0"
    monkeypatch.setenv("PENSTOCK_STATE", url)
    assert settings_from_mapping(file_and_environment(str(file))).state == url


@pytest.mark.parametrize("release", ["prod", "llm"])
def test_a_gateway_that_is_down_raises_its_alert(release: str, tmp_path: Path) -> None:
    """By the labels that the ServiceMonitor gives its targets, whatever the release is called."""
    (monitor,) = of_kind(render(EVERYTHING, tmp_path, release), "ServiceMonitor").values()
    (endpoint,) = monitor["spec"]["endpoints"]
    service = f"{release}-gateway"  # which is the job, unless the monitor says otherwise
    labels = {"job": service, "namespace": "ml", "service": service, "pod": f"{service}-x", "endpoint": "http"}
    for rule in endpoint["relabelings"]:
        assert rule["action"] == "replace"
        labels[rule["targetLabel"]] = rule["replacement"]
    export_to(tmp_path)
    series = ",".join(f'{name}="{value}"' for name, value in labels.items())
    expr = 'count by (pod) (ALERTS{alertname="PenstockDown",alertstate="firing"})'
    fires = {"labels": f'{{pod="{labels["pod"]}"}}', "value": 1}
    test = {
        "input_series": [{"series": f"up{{{series}}}", "values": "0x20"}],
        "promql_expr_test": [{"expr": expr, "eval_time": "5m", "exp_samples": [fires]}],
    }
    run_rule_tests(tmp_path, tmp_path / RULES, [test])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"workers": {"m": {}}}, "set workerSecret.value or workerSecret.existingSecret"),
        ({"workerSecret": {"value": "x"}}, "workers"),
        ({**SMALLEST, "settings": {"models": {"x": {}}}}, "settings.models"),
        ({**SMALLEST, "workers": {"m": {"replica": 2}}}, "replica"),
    ],
)
def test_what_is_wrong_with_values_is_said(values: dict[str, Any], reason: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    command = [tool("helm"), "template", "prod", str(CHART), "--values", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert reason in done.stderr
