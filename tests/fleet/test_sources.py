"""Which sources of workers the settings lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.config import ConfigError, load
from router.fleet.discovery.sources import discoveries


def names(**settings: Any) -> list[str]:
    return [source.name for source in discoveries(load(settings))]


def test_named_workers_come_first_and_one_further_source_may_follow(tmp_path: Path) -> None:
    file = str(tmp_path / "workers.toml")
    assert names() == []
    assert names(worker="a:1,b:1") == ["static"]
    assert names(discovery="dns", dns_name="workers.example:50051") == ["dns"]
    assert names(worker="a:1", discovery="file", discovery_file=file) == ["static", "file"]


def test_every_service_is_a_source_of_its_own(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        """
        current-context: c
        contexts: [{name: c, context: {cluster: k, user: u}}]
        clusters: [{name: k, cluster: {server: "https://127.0.0.1:6443"}}]
        users: [{name: u, user: {token: t}}]
        """
    )
    settings = {"discovery": "kubernetes", "kubeconfig": str(kubeconfig)}
    assert names(**settings, kube_service="ns/prefill,ns/decode:grpc") == ["kubernetes"] * 2
    with pytest.raises(ValueError, match="not NAMESPACE/NAME"):
        names(**settings, kube_service="prefill")


def test_outside_of_a_cluster_there_is_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="--kubeconfig"):
        names(discovery="kubernetes", kube_service="ns/workers")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"discovery": "file"}, "--discovery file and --discovery-file go together"),
        ({"discovery_file": "f"}, "--discovery file and --discovery-file go together"),
        ({"discovery": "dns"}, "--discovery dns and --dns-name go together"),
        ({"discovery": "kubernetes"}, "--discovery kubernetes and --kube-service go together"),
        ({"discovery": "dns", "dns_name": "workers.example"}, "dns_name"),
    ],
)
def test_a_source_and_what_it_needs_go_together(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(settings)
