"""How a command reaches a server: the address and TLS flags, and the channel they describe."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import grpc

DEFAULT_ADDRESS = "127.0.0.1:50050"


class ConnectionFlagsError(ValueError):
    """The flags contradict each other or name a file that cannot be read."""


@dataclass(frozen=True)
class Connection:
    """A server's gRPC target and how to talk to it; `credentials` is None for plain text."""

    target: str
    credentials: grpc.ChannelCredentials | None
    options: tuple[tuple[str, str | int], ...]

    def open(self) -> grpc.aio.Channel:
        """A channel of the running loop; the caller closes it."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.target, self.options)
        return grpc.aio.secure_channel(self.target, self.credentials, self.options)


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --addr and the --tls flags."""
    parser.add_argument(
        "--addr",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="the server, also unix:PATH (default: %(default)s)",
    )
    tls = parser.add_argument_group("TLS")
    tls.add_argument("--tls", action="store_true", help="use TLS, checked by the system's CAs")
    tls.add_argument("--tls-ca", type=Path, metavar="FILE", help="CA certificates, PEM")
    tls.add_argument("--tls-cert", type=Path, metavar="FILE", help="own certificate, PEM")
    tls.add_argument("--tls-key", type=Path, metavar="FILE", help="own private key, PEM")
    tls.add_argument("--tls-server-name", metavar="NAME", help="expected name in the certificate")


def add_token_flag(
    parser: argparse.ArgumentParser,
    flag: str = "--token-file",
    dest: str = "token",
    text: str = "send the bearer token in this file",
) -> None:
    """Adds --token-file, for commands whose calls a server may demand a token for."""
    parser.add_argument(flag, dest=dest, type=_token, metavar="FILE", help=text)


def authorization(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata that carry a token; none without one."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def connection(args: argparse.Namespace, address: str | None = None) -> Connection:
    """The connection that the flags describe, to `address` instead of --addr if given.

    Raises ConnectionFlagsError.
    """
    target = _target(address or args.addr)
    options: dict[str, str | int] = {
        # A proxy from the environment is meant for the web, not for the neighbour.
        "grpc.enable_http_proxy": 0,
        # What is too large is the server's to say, with its limit named.
        "grpc.max_receive_message_length": -1,
        "grpc.max_send_message_length": -1,
    }
    files = (args.tls_ca, args.tls_cert, args.tls_key)
    if not args.tls:
        if any(files) or args.tls_server_name:
            raise ConnectionFlagsError("the --tls-… flags need --tls")
        return Connection(target, None, tuple(options.items()))
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ConnectionFlagsError("--tls-cert and --tls-key go together")
    try:
        ca, certificate, key = (path.read_bytes() if path else None for path in files)
    except OSError as error:
        raise ConnectionFlagsError(f"cannot read {error.filename}: {error.strerror}") from error
    if args.tls_server_name:
        options["grpc.ssl_target_name_override"] = args.tls_server_name
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    return Connection(target, credentials, tuple(options.items()))


def _target(address: str) -> str:
    if address.startswith("unix:"):
        return address
    host, colon, port = address.removeprefix("grpc://").rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ConnectionFlagsError(f"not an address: {address!r} (write HOST:PORT or unix:PATH)")
    return f"{host}:{port}"


def _token(file: str) -> str:
    try:
        token = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {file}") from error
    if not re.fullmatch(r"[!-~]+", token):
        raise argparse.ArgumentTypeError(f"{file} does not hold one token")
    return token
