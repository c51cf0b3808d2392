"""How to reach a Kubernetes API server: from within a pod, or by a kubeconfig."""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class AccessError(ValueError):
    """There is no usable access; the message says what is missing."""


@dataclass(frozen=True)
class KubeAccess:
    """Server URL and credentials.

    A token in a file is read for every request, as Kubernetes renews it while
    the pod runs; `tls` is made anew for every session for the same reason.
    """

    server: str
    ca: bytes | Path | None = None
    verify: bool = True
    token: str = ""
    token_file: Path | None = None
    client_certificate: bytes | Path | None = None
    client_key: bytes | Path | None = None

    def headers(self) -> dict[str, str]:
        """Headers of one request. Raises OSError when the token cannot be read."""
        token = self.token_file.read_text().strip() if self.token_file else self.token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def tls(self) -> ssl.SSLContext | bool:
        """What aiohttp takes as `ssl`. Raises OSError or `ssl.SSLError`."""
        if not self.server.startswith("https:"):
            return True
        ca = None if self.ca is None else _content(self.ca).decode("ascii")
        context = ssl.create_default_context(cadata=ca)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.client_certificate is not None and self.client_key is not None:
            _load_chain(context, _content(self.client_certificate), _content(self.client_key))
        return context


def in_cluster(
    environment: Mapping[str, str] = os.environ, folder: Path = _SERVICE_ACCOUNT
) -> KubeAccess:
    """The pod's own service account. Raises `AccessError` outside of a pod."""
    host = environment.get("KUBERNETES_SERVICE_HOST")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (folder / "token").exists():
        raise AccessError("not in a Kubernetes pod with a service account; give --kubeconfig")
    host = f"[{host}]" if ":" in host else host
    return KubeAccess(f"https://{host}:{port}", ca=folder / "ca.crt", token_file=folder / "token")


def from_kubeconfig(path: Path) -> KubeAccess:
    """The current context of a kubeconfig. Raises `AccessError`.

    Token, token file and client certificate are understood; programs and
    providers that fetch credentials are not run.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise AccessError(f"the kubeconfig {path.name} cannot be read") from error
    if not isinstance(document, dict):
        raise AccessError(f"{path.name} is not a kubeconfig")
    context = _named(document, "contexts", "context", document.get("current-context"))
    cluster = _named(document, "clusters", "cluster", context.get("cluster"))
    user = _named(document, "users", "user", context.get("user"))
    for kind in ("exec", "auth-provider"):
        if kind in user:
            raise AccessError(f"credentials by {kind!r} are not supported; use a token")
    folder = path.parent
    token_file = user.get("tokenFile")
    return KubeAccess(
        server=str(cluster.get("server", "")).rstrip("/"),
        ca=_material(cluster, "certificate-authority", folder),
        verify=not cluster.get("insecure-skip-tls-verify", False),
        token=str(user.get("token", "")),
        token_file=folder / token_file if token_file else None,
        client_certificate=_material(user, "client-certificate", folder),
        client_key=_material(user, "client-key", folder),
    )


def _named(document: dict[str, Any], group: str, kind: str, name: object) -> dict[str, Any]:
    for entry in document.get(group) or ():
        if entry.get("name") == name and isinstance(entry.get(kind), dict):
            found: dict[str, Any] = entry[kind]
            return found
    raise AccessError(f"the kubeconfig has no {kind} named {name!r}")


def _material(entry: dict[str, Any], key: str, folder: Path) -> bytes | Path | None:
    if f"{key}-data" in entry:
        return base64.b64decode(entry[f"{key}-data"])
    return folder / entry[key] if key in entry else None


def _content(material: bytes | Path) -> bytes:
    return material if isinstance(material, bytes) else material.read_bytes()


def _load_chain(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    # OpenSSL takes a client's certificate from a file only.
    with tempfile.NamedTemporaryFile() as file:  # 0600
        file.write(certificate + b"\n" + key)
        file.flush()
        context.load_cert_chain(file.name)
