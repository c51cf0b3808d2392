"""Which sources of workers the settings ask for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from router.config import Settings
from router.fleet.discovery.base import Discovery
from router.fleet.discovery.dns import DnsDiscovery
from router.fleet.discovery.file import FileDiscovery
from router.fleet.discovery.kube_slices import Keys, ServiceName
from router.fleet.discovery.static import StaticDiscovery
from router.fleet.endpoint import Endpoint, Role


def discoveries(settings: Settings, further: Iterable[str] = ()) -> list[Discovery]:
    """The named workers first, then the source of `discovery`.

    `further` are addresses besides those in the settings. Raises ValueError
    when a source cannot be set up.
    """
    named = [
        *(Endpoint(address) for address in (*settings.worker, *further)),
        *(Endpoint(address, Role.PREFILL) for address in settings.prefill),
        *(Endpoint(address, Role.DECODE) for address in settings.decode),
    ]
    sources: list[Discovery] = [StaticDiscovery(named)] if named else []
    interval = settings.discovery_interval
    match settings.discovery:
        case "file":
            sources.append(FileDiscovery(Path(settings.discovery_file), interval=interval))
        case "dns":
            sources.append(DnsDiscovery(settings.dns_name, interval=interval))
        case "kubernetes":
            sources += _kubernetes(settings)
    return sources


def _kubernetes(settings: Settings) -> list[Discovery]:
    from router.fleet.discovery.kube_access import from_kubeconfig, in_cluster
    from router.fleet.discovery.kubernetes import KubernetesDiscovery, KubeSettings

    access = from_kubeconfig(Path(settings.kubeconfig)) if settings.kubeconfig else in_cluster()
    kube = KubeSettings(
        settings.kube_resync, Keys(settings.kube_role_label, settings.kube_model_label)
    )
    return [
        KubernetesDiscovery(ServiceName.parse(name), access, kube) for name in settings.kube_service
    ]
