"""What the settings ask for: TLS on either side, and bearer tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_reflection.v1alpha import reflection

from router.config import Settings
from router.fleet.certificates import (
    CertificateFiles,
    Renewing,
    client_credentials,
    server_credentials,
)
from router.fleet.fleet import Fleet
from router.observe.metrics import Metrics
from router.rpc.auth import BearerAuth, TokenFile
from router.wire import ADMIN_SERVICE, ENGINE_SERVICE

# Seconds between looks at the certificates used towards workers.
_RENEWAL_INTERVAL = 5.0


class Security:
    """Credentials of the listeners and towards workers; None means in the clear.

    Raises ValueError, which names the flag, when a file cannot be used.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.listener: grpc.ServerCredentials | None = None
        if settings.tls_cert:
            files = _files(settings.tls_client_ca, settings.tls_cert, settings.tls_key)
            with _said_of("--tls-cert, --tls-key, --tls-client-ca"):
                self.listener = server_credentials(Renewing(files))
        self._towards_workers: Renewing | None = None
        self.worker_credentials: Callable[[], grpc.ChannelCredentials] | None = None
        paths = (settings.worker_tls_ca, settings.worker_tls_cert, settings.worker_tls_key)
        if settings.worker_tls or settings.worker_tls_server_name or any(paths):
            with _said_of("--worker-tls-ca, --worker-tls-cert, --worker-tls-key"):
                renewing = self._towards_workers = Renewing(_files(*paths))
            self.worker_credentials = lambda: client_credentials(renewing)
        self.interceptors = _interceptors(settings, metrics)

    async def follow(self, fleet: Fleet) -> None:
        """Connects to the workers anew whenever the certificates for that are renewed.

        Listeners need nothing: they look at each new connection.
        """
        if self._towards_workers is None:
            await asyncio.Event().wait()
        else:
            await self._towards_workers.follow(_RENEWAL_INTERVAL, fleet.renew_channels)


def _files(ca: str, certificate: str, key: str) -> CertificateFiles:
    return CertificateFiles(*(Path(path) if path else None for path in (ca, certificate, key)))


def _interceptors(settings: Settings, metrics: Metrics) -> list[grpc.aio.ServerInterceptor]:
    rules: dict[str, TokenFile] = {}
    if settings.client_tokens:
        clients = _tokens("--client-tokens", settings.client_tokens)
        rules |= {ENGINE_SERVICE: clients, reflection.SERVICE_NAME: clients}
    if settings.admin_tokens:
        rules[ADMIN_SERVICE] = _tokens("--admin-tokens", settings.admin_tokens)
    if not rules:
        return []  # an interceptor costs every call a little
    return [BearerAuth(rules, lambda service: metrics.unauthenticated.labels(service).inc())]


def _tokens(flag: str, path: str) -> TokenFile:
    with _said_of(flag):
        return TokenFile(Path(path))


@contextmanager
def _said_of(flags: str) -> Iterator[None]:
    """Puts the flags before what is wrong with their files."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flags}: {error.filename} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{flags}: {error}") from error
