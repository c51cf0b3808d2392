"""A port that several listen on, and nobody else."""

from __future__ import annotations

import select
import socket

import pytest

from router.supervise.port import hold


def listener(address: str) -> socket.socket:
    """What one process of several does."""
    host, _, port = address.rpartition(":")
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((host, int(port)))
    bound.listen()
    return bound


def test_several_listen_on_a_port_that_is_held_and_the_holder_gets_nothing() -> None:
    address, held = hold("127.0.0.1:0")
    host, _, port = address.rpartition(":")
    with held, listener(address) as first, listener(address) as second:
        taken = 0
        for _ in range(16):
            with socket.create_connection((host, int(port)), timeout=5):
                # A connection may be complete here before it can be accepted there.
                ready, _, _ = select.select((first, second), (), (), 10)
                for taker in ready:
                    taker.accept()[0].close()
                    taken += 1
        assert taken == 16


def test_a_port_that_others_share_already_is_refused() -> None:
    address, held = hold("127.0.0.1:0")
    with held, listener(address), pytest.raises(OSError, match="in use"):
        hold(address)


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(OSError):
        hold("192.0.2.1:0")
