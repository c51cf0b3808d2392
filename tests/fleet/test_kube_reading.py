"""EndpointSlices and kubeconfigs, read."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from router.fleet.discovery.kube_access import AccessError, from_kubeconfig, in_cluster
from router.fleet.discovery.kube_slices import ServiceName, read
from tests.fleet.kube_api import endpoint_slice


def addresses(*slices: dict[str, object], port: str = "") -> list[str]:
    return [found.address for found in read(slices, port)]


def test_only_ready_endpoints_that_do_not_end_count() -> None:
    conditions = [
        ({}, True),
        ({"ready": True}, True),
        ({"ready": None}, True),
        ({"ready": False}, False),
        ({"ready": True, "terminating": True}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
    ]
    for given, usable in conditions:
        found = addresses(endpoint_slice("a", "10.0.0.1", conditions=given))
        assert bool(found) is usable, given


def test_an_endpoint_in_two_slices_is_one_worker() -> None:
    pieces = [endpoint_slice(n, "10.0.0.1", "10.0.0.2", pods=True) for n in ("a", "b")]
    assert addresses(*pieces) == ["10.0.0.1:50051", "10.0.0.2:50051"]


def test_a_dual_stack_pod_is_one_worker() -> None:
    four = endpoint_slice("four", "10.0.0.1", pods=True)
    six = endpoint_slice("six", "fd00::1", family="IPv6", pods=True)
    six["endpoints"][0]["targetRef"] = four["endpoints"][0]["targetRef"]
    assert addresses(six, four) == ["10.0.0.1:50051"]
    assert addresses(six) == ["[fd00::1]:50051"]


def test_names_are_no_addresses() -> None:
    assert addresses(endpoint_slice("a", "worker.example", family="FQDN")) == []


def test_which_port() -> None:
    both = [{"name": "http", "port": 8000}, {"name": "grpc", "port": 50051}]
    other = [{"name": "http", "port": 8000}, {"name": "engine", "port": 50052}]
    one = [{"name": None, "port": 7}]
    assert addresses(endpoint_slice("a", "h", ports=both)) == ["h:50051"]
    assert addresses(endpoint_slice("a", "h", ports=one)) == ["h:7"]
    assert addresses(endpoint_slice("a", "h", ports=other), port="engine") == ["h:50052"]
    assert addresses(endpoint_slice("a", "h", ports=[]), port="9000") == ["h:9000"]
    with pytest.raises(ValueError, match="no port is named grpc; its ports: http, engine"):
        addresses(endpoint_slice("a", "h", ports=other))
    assert addresses(endpoint_slice("a", ports=other)) == [], "nobody there, nothing to ask"


@pytest.mark.parametrize("text", ["a", "a/", "/b", "a/b/c", "A/b", "a/b:", "a b/c"])
def test_what_is_no_service_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match="not NAMESPACE/NAME"):
        ServiceName.parse(text)


def test_a_service_with_a_port() -> None:
    assert ServiceName.parse("ns/workers:grpc") == ServiceName("ns", "workers", "grpc")


def test_the_pod_s_own_account_renews_its_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = in_cluster(environment, tmp_path)
    assert access.server == "https://[fd00::1]:6443"
    assert access.headers() == {"Authorization": "Bearer one"}
    (tmp_path / "token").write_text("two\n")
    assert access.headers() == {"Authorization": "Bearer two"}


def test_outside_of_a_pod_there_is_no_account(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="--kubeconfig"):
        in_cluster({}, tmp_path)


def kubeconfig(folder: Path, user: dict[str, object], **cluster: object) -> Path:
    file = folder / "config"
    file.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                "clusters": [{"name": "k", "cluster": {"server": "https://api:6443/", **cluster}}],
                "users": [{"name": "u", "user": user}],
            }
        )
    )
    return file


def test_a_kubeconfig_with_a_token(tmp_path: Path) -> None:
    ca = base64.b64encode(b"PEM").decode()
    file = kubeconfig(tmp_path, {"token": "t"}, **{"certificate-authority-data": ca})
    access = from_kubeconfig(file)
    assert access.server == "https://api:6443"
    assert access.headers() == {"Authorization": "Bearer t"}
    assert access.ca == b"PEM"
    assert access.verify


def test_files_of_a_kubeconfig_are_beside_it(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("from a file")
    user = {"tokenFile": "t", "client-certificate": "c.pem", "client-key": "k.pem"}
    access = from_kubeconfig(kubeconfig(tmp_path, user))
    assert access.headers() == {"Authorization": "Bearer from a file"}
    assert access.client_certificate == tmp_path / "c.pem"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", "cannot be read"),
        ("3", "not a kubeconfig"),
        ("current-context: x", "no context named 'x'"),
    ],
)
def test_a_kubeconfig_that_is_none(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "config"
    file.write_text(content)
    with pytest.raises(AccessError, match=said):
        from_kubeconfig(file)


def test_programs_are_not_run_for_credentials(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path, {"exec": {"command": "aws"}})
    with pytest.raises(AccessError, match="'exec'"):
        from_kubeconfig(file)
