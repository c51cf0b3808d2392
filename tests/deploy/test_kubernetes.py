"""The manifests are valid, and say what the router says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from router import config
from router.fleet.discovery.kube_slices import ServiceName
from router.units import parse_duration, parse_size
from router.wire import ENGINE_SERVICE

ROOT = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUSTOMIZATIONS = sorted(ROOT.rglob("kustomization.yaml"))
MANIFESTS = sorted(set(ROOT.rglob("*.yaml")) - set(KUSTOMIZATIONS))
# Of kinds that every cluster knows; test_monitoring.py has those of the Prometheus operator.
BUILT_IN = [file for file in MANIFESTS if file.parent.name != "monitoring"]
# The oldest in which everything used is on by default (native sidecars, preStop sleep), and
# what is newest to the validator.
VERSIONS = ("1.30", kubernetes_validate.latest_version())


def documents(file: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


def pods() -> list[dict[str, Any]]:
    found = [d for file in MANIFESTS for d in documents(file) if d["kind"] == "Deployment"]
    return [deployment["spec"]["template"]["spec"] for deployment in found]


def kustomized(file: Path) -> list[dict[str, Any]]:
    """What `labels` with includeSelectors adds to a manifest, without which it is incomplete."""
    kustomization = documents(file.parent / "kustomization.yaml")[0]
    labels = {k: v for entry in kustomization.get("labels", []) for k, v in entry["pairs"].items()}
    made = documents(file)
    for document in made:
        spec = document.get("spec", {})
        if labels and document["kind"] in ("Deployment", "PodDisruptionBudget"):
            spec["selector"] = {"matchLabels": labels}
        if labels and document["kind"] == "Deployment":
            spec["template"].setdefault("metadata", {})["labels"] = labels
    return made


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", BUILT_IN, ids=lambda f: f"{f.parent.name}/{f.name}")
def test_a_manifest_is_valid_to_the_letter(file: Path, version: str) -> None:
    assert documents(file)
    for document in kustomized(file):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("file", KUSTOMIZATIONS, ids=lambda f: f.parent.name)
def test_a_kustomization_names_every_manifest_beside_it_and_no_other(file: Path) -> None:
    (kustomization,) = documents(file)
    assert kustomization["kind"] == "Kustomization"
    beside = {f.name for f in MANIFESTS if f.parent == file.parent}
    assert set(kustomization["resources"]) == beside


def test_the_settings_are_the_router_s_own(tmp_path: Path) -> None:
    (text,) = documents(ROOT / "router" / "configmap.yaml")
    file = tmp_path / "mmrouter.toml"
    file.write_text(text["data"]["mmrouter.toml"])
    settings = config.load({}, file)
    assert settings.discovery == "kubernetes"
    (service,) = map(ServiceName.parse, settings.kube_service)
    (worker,) = documents(ROOT / "workers" / "service.yaml")
    (kustomization,) = documents(ROOT / "workers" / "kustomization.yaml")
    assert (service.namespace, service.name) == (
        kustomization["namespace"],
        worker["metadata"]["name"],
    )


def test_every_variable_is_a_setting_of_the_router() -> None:
    known = {f"MMROUTER_{name.upper()}" for name in config.Settings.model_fields}
    for pod in pods():
        for container in pod["containers"]:
            assert {variable["name"] for variable in container.get("env", [])} <= known


def drain_of(pod: dict[str, Any]) -> float:
    (router,) = pod["containers"]
    for variable in router.get("env", []):
        if variable["name"] == "MMROUTER_DRAIN_TIMEOUT":
            return parse_duration(variable["value"])
    (text,) = documents(ROOT / "router" / "configmap.yaml")
    return parse_duration(tomllib.loads(text["data"]["mmrouter.toml"])["drain_timeout"])


def test_a_pod_lives_long_enough_to_drain() -> None:
    assert len(pods()) == 2
    for pod in pods():
        (router,) = pod["containers"]
        pause = router["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] >= pause + drain_of(pod) + 10


def test_probes_ask_for_what_they_mean() -> None:
    for pod in pods():
        (router,) = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in router["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert router[probe]["grpc"]["port"] == ports["grpc"]
        assert router["readinessProbe"]["grpc"]["service"] == ENGINE_SERVICE
        # Workers that are gone are no reason to restart a router.
        assert "service" not in router["livenessProbe"]["grpc"]


def test_the_worker_beside_the_router_starts_before_and_ends_after_it() -> None:
    started = [(p, c) for p in pods() for c in p["initContainers"] if "restartPolicy" in c]
    ((pod, worker),) = started
    assert worker["restartPolicy"] == "Always"
    assert "startupProbe" in worker
    (router,) = pod["containers"]
    shared = [
        {m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"}
        for container in (worker, router)
    ]
    assert shared[0] == shared[1] != set()


def test_the_account_may_read_what_discovery_reads_and_nothing_else() -> None:
    account, role, binding = documents(ROOT / "router" / "rbac.yaml")
    allowed = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert allowed == {
        ("discovery.k8s.io", "endpointslices", "list"),
        ("discovery.k8s.io", "endpointslices", "watch"),
        ("", "pods", "get"),
    }
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["name"] == account["metadata"]["name"]
    (deployment,) = documents(ROOT / "router" / "deployment.yaml")
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == "mmrouter"


def settings_of(pod: dict[str, Any], tmp_path: Path) -> config.Settings:
    (router,) = pod["containers"]
    file = tmp_path / "mmrouter.toml"
    (text,) = documents(ROOT / "router" / "configmap.yaml")
    file.write_text(text["data"]["mmrouter.toml"] if "--config" in router["args"] else "")
    variables = {v["name"]: v["value"] for v in router.get("env", [])}
    return config.load(
        {name.removeprefix("MMROUTER_").lower(): value for name, value in variables.items()}, file
    )


def test_a_pod_has_the_memory_that_its_settings_may_take(tmp_path: Path) -> None:
    # The process, and freed memory that is kept: docs/operations.md, sizing.
    beside = (400 + 512) << 20
    for pod in pods():
        (router,) = pod["containers"]
        settings = settings_of(pod, tmp_path)
        needed = settings.media_budget_bytes + settings.media_cache_bytes + beside
        assert needed <= parse_size(router["resources"]["limits"]["memory"] + "B")
        # A node may have many more CPUs than the pod asks for.
        assert settings.media_threads > 0


def test_the_kernels_of_the_image_are_where_the_volume_hides_them() -> None:
    dockerfile = (ROOT.parents[1] / "Dockerfile").read_text()
    cache = re.findall(r"NUMBA_CACHE_DIR=(\S+)", dockerfile)
    for pod in pods():
        (router,) = pod["containers"]
        (kernels,) = (c for c in pod["initContainers"] if c["name"] == "kernels")
        assert kernels["image"] == router["image"]
        *copy, source, target = kernels["command"]
        assert copy == ["cp", "-r"]
        assert [source] == cache
        mounts = {
            c["name"]: {m["mountPath"] for m in c["volumeMounts"] if m["name"] == "state"}
            for c in (kernels, router)
        }
        assert mounts == {"kernels": {target}, "router": {str(Path(source).parent)}}
