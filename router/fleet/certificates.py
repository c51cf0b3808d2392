"""Certificates in PEM files that somebody renews while the router runs."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from router.observe.logging import get_logger

_log = get_logger("tls")


class CertificateError(ValueError):
    """The files cannot be used; the message names the file and never its content."""


@dataclass(frozen=True)
class Certificates:
    """PEM contents; None where there is no such file. They fit together."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None


@dataclass(frozen=True)
class CertificateFiles:
    """`ca` holds who is trusted; `certificate` (a chain) and `key` are our own."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def raw(self) -> Certificates:
        """The present contents, whether they fit together or not. Raises `CertificateError`."""
        return Certificates(*(_content(p) for p in (self.ca, self.certificate, self.key)))

    def read(self) -> Certificates:
        """The present contents. Raises `CertificateError`.

        A renewal replaces one file after the other; what does not fit together
        is refused, so that nobody is offered a certificate without its key.
        """
        read = self.raw()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
            if read.ca is not None:
                context.load_verify_locations(cadata=read.ca.decode("ascii"))
        except (ssl.SSLError, UnicodeDecodeError, OSError) as error:
            names = ", ".join(str(p) for p in (self.ca, self.certificate, self.key) if p)
            raise CertificateError(f"{names} cannot be used: {_why(error)}") from error
        if read != self.raw():
            raise CertificateError("the certificates are being replaced")
        return read


class Renewing:
    """The last good contents of files that change."""

    def __init__(self, files: CertificateFiles) -> None:
        """Raises `CertificateError` when they cannot be used now."""
        self._files = files
        self._trouble = ""
        self.current = files.read()

    def renewed(self) -> bool:
        """Reads again; whether there is something new. Bad files leave the last good ones."""
        try:
            # At every new connection, so what has not changed is not parsed again.
            unchanged = self._files.raw() == self.current
            found = self.current if unchanged else self._files.read()
        except CertificateError as error:
            if str(error) != self._trouble:
                _log.error("certificates_not_renewed", why=str(error))
                self._trouble = str(error)
            return False
        self._trouble = ""
        if unchanged:
            return False
        self.current = found
        _log.info("certificates_renewed")
        return True

    async def follow(self, interval: float, then: Callable[[], Awaitable[None]]) -> None:
        """Looks every `interval` seconds, and calls `then` after each renewal."""
        while True:
            await asyncio.sleep(interval)
            if await asyncio.to_thread(self.renewed):
                await then()


def client_credentials(renewing: Renewing) -> grpc.ChannelCredentials:
    """Credentials towards a server, by the present contents; the system's CAs without `ca`."""
    present = renewing.current
    return grpc.ssl_channel_credentials(present.ca, present.key, present.certificate)


def server_credentials(renewing: Renewing) -> grpc.ServerCredentials:
    """Credentials of a listener; each new connection gets what the files hold by then.

    With `ca`, clients have to show a certificate that it has signed.
    """

    def configuration() -> grpc.ServerCertificateConfiguration:
        present = renewing.current
        assert present.certificate is not None
        assert present.key is not None
        pairs = [(present.key, present.certificate)]
        return grpc.ssl_server_certificate_configuration(pairs, present.ca)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        return configuration() if renewing.renewed() else None

    # None says that nothing has changed, which the stubs do not know.
    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        fetch,  # type: ignore[arg-type]
        require_client_authentication=renewing.current.ca is not None,
    )


def _content(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}") from error


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not PEM"
    return type(error).__name__
