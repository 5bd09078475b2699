"""Schemas and tools that the files in deploy/ are checked with. All of them come with packages of the test extra."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.37"  # of the schemas
MODELS = {
    "keda.sh": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com": "cloudcoil.models.prometheus_operator.v1",
}

Manifest = dict[str, Any]


def tool(name: str) -> str:
    """The path of a command that a package of the test extra brings, or that the system has."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not available for this platform")
    return str(found)


def run(*command: str, **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def read(path: Path) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def check(manifest: Manifest) -> None:
    """Against the schema of its kind, in which no unknown field is allowed."""
    group = manifest["apiVersion"].partition("/")[0]
    if group in MODELS:
        _check_model(manifest, importlib.import_module(MODELS[group]))
    elif group == "ray.io":
        jsonschema.validate(manifest, RAY_CLUSTER)
        for template in _pod_templates(manifest):
            check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template})
    else:
        import kubernetes_validate

        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def _check_model(manifest: Manifest, models: ModuleType) -> None:
    """Against a custom resource definition as pydantic models, which drop fields that they do not know."""
    kind = getattr(models, manifest["kind"])
    known = kind.model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert known == manifest


def _pod_templates(manifest: Manifest) -> list[Manifest]:
    spec = manifest["spec"]
    groups = [*spec.get("workerGroupSpecs", []), *([spec["headGroupSpec"]] if "headGroupSpec" in spec else [])]
    return [group["template"] for group in groups]


def _closed(required: list[str], **properties: Any) -> Manifest:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


_TEXT, _COUNT, _MAP = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}

# No package has the schema of KubeRay: these are the fields in use, as in its custom resource definition (ray.io/v1).
# Pods in it are checked as those of Kubernetes.
RAY_CLUSTER = _closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion=_TEXT,
    kind=_TEXT,
    metadata=_MAP,
    spec=_closed(
        ["headGroupSpec"],
        rayVersion=_TEXT,
        enableInTreeAutoscaling={"type": "boolean"},
        headGroupSpec=_closed(["template"], rayStartParams=_TEXTS, template=_MAP),
        workerGroupSpecs={
            "type": "array",
            "items": _closed(
                ["groupName", "maxReplicas", "minReplicas", "template"],
                groupName=_TEXT,
                replicas=_COUNT,
                minReplicas=_COUNT,
                maxReplicas=_COUNT,
                rayStartParams=_TEXTS,
                template=_MAP,
            ),
        },
    ),
)


def compose_schema() -> Manifest:
    vendored = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema: Manifest = json.loads(vendored.read_text())
    return schema
