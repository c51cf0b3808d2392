"""EndpointSlices of a Service, read into endpoints: pure.

API: discovery.k8s.io/v1, where the endpoints of one Service are spread over any
number of slices, the same endpoint may for a moment be in two of them, and a
dual-stack pod is in one of each address family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from router.config import worker_address
from router.fleet.endpoint import Endpoint, Role, role_named

_SERVICE = re.compile(
    r"(?P<namespace>[a-z0-9]([-a-z0-9]*[a-z0-9])?)/(?P<name>[a-z0-9]([-a-z0-9]*[a-z0-9])?)"
    r"(:(?P<port>[a-z0-9-]+))?"
)
# In order of preference where a pod has both.
_FAMILIES = ("IPv4", "IPv6")


@dataclass(frozen=True)
class ServiceName:
    """A Service, and which of its ports: a number, a name, or empty for the obvious one."""

    namespace: str
    name: str
    port: str = ""

    @classmethod
    def parse(cls, text: str) -> ServiceName:
        """From NAMESPACE/NAME or NAMESPACE/NAME:PORT. Raises ValueError."""
        match = _SERVICE.fullmatch(text)
        if match is None:
            raise ValueError(f"not NAMESPACE/NAME or NAMESPACE/NAME:PORT: {text!r}")
        return cls(match["namespace"], match["name"], match["port"] or "")


@dataclass(frozen=True)
class Keys:
    """Labels or annotations, on the slice or else on the pod, that tell what a worker is for."""

    role: str = ""
    model: str = ""

    def told_by(self, metadata: Mapping[str, Any]) -> bool:
        """Whether an object's metadata answer every key that is asked for."""
        return all(not key or _value(metadata, key) for key in (self.role, self.model))


@dataclass(frozen=True)
class Pod:
    """The pod behind an endpoint, where there is one. `uid` differs between namesakes."""

    name: str
    uid: str


@dataclass(frozen=True)
class Found:
    """One endpoint of a Service that may get requests, not yet told what it is for."""

    address: str
    pod: Pod | None
    slice_metadata: Mapping[str, Any]
    zone: str

    def endpoint(self, keys: Keys, pod_metadata: Mapping[str, Any]) -> Endpoint:
        """Raises ValueError where the role is none."""
        role = _value(self.slice_metadata, keys.role) or _value(pod_metadata, keys.role)
        model = _value(self.slice_metadata, keys.model) or _value(pod_metadata, keys.model)
        labels = {"pod": self.pod.name if self.pod else "", "zone": self.zone}
        return Endpoint(
            self.address,
            role_named(role) if role else Role.BOTH,
            model,
            {name: value for name, value in labels.items() if value},
        )


def read(slices: Iterable[Mapping[str, Any]], wanted_port: str = "") -> list[Found]:
    """The endpoints that are ready and not terminating, each pod once, by address.

    Pods that Kubernetes takes for not ready are left out, whatever they say to
    us: an operator may have taken them out on purpose. Raises ValueError where a
    slice has several ports and nothing says which is meant, or an address that is none.
    """
    found: dict[str, Found] = {}
    pods: set[str] = set()
    for piece in sorted(slices, key=_family_order):
        if piece.get("addressType") not in _FAMILIES:
            continue
        entries = [e for e in piece.get("endpoints") or () if _usable(e)]
        if not entries:
            continue
        port = _port(piece.get("ports") or (), wanted_port)
        seen_here: set[str] = set()
        for entry in entries:
            host = entry["addresses"][0]
            pod = _pod(entry.get("targetRef"))
            address = worker_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
            if address in found or (pod is not None and pod.uid in pods):
                continue
            if pod is not None:
                seen_here.add(pod.uid)
            metadata = piece.get("metadata") or {}
            found[address] = Found(address, pod, metadata, entry.get("zone") or "")
        pods |= seen_here
    return [found[address] for address in sorted(found)]


def _usable(entry: Mapping[str, Any]) -> bool:
    conditions = entry.get("conditions") or {}
    # Unset means ready (discovery.k8s.io/v1: "nil should be interpreted as true").
    ready = conditions.get("ready") is not False
    return ready and not conditions.get("terminating") and bool(entry.get("addresses"))


def _family_order(piece: Mapping[str, Any]) -> tuple[int, str]:
    kind = piece.get("addressType")
    order = _FAMILIES.index(kind) if kind in _FAMILIES else len(_FAMILIES)
    return order, str((piece.get("metadata") or {}).get("name"))


def _pod(target: Mapping[str, Any] | None) -> Pod | None:
    if not target or target.get("kind") != "Pod":
        return None
    return Pod(target.get("name") or "", target.get("uid") or target.get("name") or "")


def _port(ports: Iterable[Mapping[str, Any]], wanted: str) -> int:
    if wanted.isdigit():
        return int(wanted)
    known = [p for p in ports if p.get("port") and p.get("protocol", "TCP") == "TCP"]
    name = wanted or ("grpc" if len(known) > 1 else "")
    matching = [p for p in known if not name or p.get("name") == name]
    if len(matching) != 1:
        names = ", ".join(str(p.get("name") or p["port"]) for p in known)
        raise ValueError(f"no port is named {name or 'anything'}; its ports: {names or 'none'}")
    return int(matching[0]["port"])


def _value(metadata: Mapping[str, Any], key: str) -> str:
    if not key:
        return ""
    for where in ("labels", "annotations"):
        value = (metadata.get(where) or {}).get(key)
        if value:
            return str(value)
    return ""
