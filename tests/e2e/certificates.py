"""Certificates of an authority of the test's own, as files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme


@dataclass
class Authority:
    """Issues certificates into a folder; `ca` is its own, as a file."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._authority = trustme.CA()
        self.ca = self.folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """A chain and its key, by default for 127.0.0.1; what stood there is replaced."""
        issued = self._authority.issue_cert(*(hosts or ("127.0.0.1",)))
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key


def client(ca: Path, pair: tuple[Path, Path] | None = None) -> grpc.ChannelCredentials:
    """What a client connects with that trusts `ca` and shows `pair`."""
    certificate, key = (path.read_bytes() for path in pair) if pair else (None, None)
    return grpc.ssl_channel_credentials(ca.read_bytes(), key, certificate)


def server(ca: Path, pair: tuple[Path, Path]) -> grpc.ServerCredentials:
    """A server that asks its clients for a certificate of `ca`."""
    certificate, key = pair
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())], ca.read_bytes(), True
    )
