"""A port for several processes: chosen and held by the supervisor, shared by SO_REUSEPORT."""

from __future__ import annotations

import socket


def hold(address: str) -> tuple[str, socket.socket]:
    """Takes HOST:PORT for processes of this user to listen on, each with SO_REUSEPORT.

    Returns the address with its real port, and the socket that keeps the port
    while none of them listens. It gets no connections, since it does not
    listen. Raises OSError when somebody else does, or the address is none of
    this host's.
    """
    host, _, port = address.rpartition(":")
    family, _, _, _, where = socket.getaddrinfo(
        host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # Another router that shares its port would let us join; without the option it does not.
    _bound(family, where, shared=False).close()
    held = _bound(family, where, shared=True)
    return f"{host}:{held.getsockname()[1]}", held


def _bound(family: socket.AddressFamily, where: object, *, shared: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # As gRPC listens: the wildcard address is for IPv4 too.
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(where)  # type: ignore[arg-type]
    except BaseException:
        bound.close()
        raise
    return bound
