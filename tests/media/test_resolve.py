"""Only public addresses, every one of them, and those that were judged are those dialled."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from router.media.resolve import (
    HostForbidden,
    HostUnknown,
    PublicResolver,
    domain_allowed,
    is_public,
)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1", "127.255.255.254", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255",
        "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.127.255.255", "224.0.0.1",
        "239.255.255.255", "240.0.0.1", "255.255.255.255", "192.0.0.1", "192.0.2.1",
        "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "192.88.99.1",
        "0.255.255.255", "10.255.255.255", "169.254.0.1", "192.0.0.8", "192.0.0.192",
        "192.0.0.255", "224.0.0.0", "255.255.255.254", "168.63.129.16",
        "::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "fe80::1", "fec0::1",
        "fc00::1", "fd00:ec2::254", "ff02::1", "64:ff9b::7f00:1", "64:ff9b::808:808",
        "64:ff9b:1::1", "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:20::1",
        "2001:db8::1", "2002:7f00:1::", "2002:808:808::", "3fff::1", "100::1", "5f00::1",
    ],
)  # fmt: skip
def test_special_addresses_are_not_public(text: str) -> None:
    assert not is_public(ip_address(text))


@pytest.mark.parametrize(
    "text",
    [
        "8.8.8.8", "1.1.1.1", "172.15.255.255", "172.32.0.1", "100.63.255.255", "100.128.0.1",
        "9.255.255.255", "11.0.0.1", "126.255.255.255", "128.0.0.1", "169.253.255.255",
        "191.255.255.255", "192.0.1.1", "192.167.255.255", "192.169.0.1", "198.17.255.255",
        "198.20.0.1", "223.255.255.255", "168.63.129.15", "168.63.129.17",
        "2606:4700::1111", "2a00::1",
    ],
)  # fmt: skip
def test_ordinary_addresses_are_public(text: str) -> None:
    assert is_public(ip_address(text))


def resolver(*answers: str, allow_private: bool = False) -> PublicResolver:
    return PublicResolver(
        allow_private=allow_private, timeout=5, threads=1, lookup=lambda host, port: answers
    )


async def test_one_private_address_among_public_ones_spoils_the_name() -> None:
    with pytest.raises(HostForbidden):
        await resolver("8.8.8.8", "10.0.0.1").addresses("h", 80)


async def test_a_scoped_link_local_address_is_refused() -> None:
    with pytest.raises(HostForbidden):
        await resolver("fe80::1%eth0").addresses("h", 80)


async def test_what_is_dialled_is_what_was_judged() -> None:
    results = await resolver("8.8.8.8", "2606:4700::1111").resolve("h", 443)
    assert [(r["host"], r["port"], r["hostname"]) for r in results] == [
        ("8.8.8.8", 443, "h"),
        ("2606:4700::1111", 443, "h"),
    ]


async def test_private_addresses_can_be_allowed() -> None:
    assert await resolver("10.0.0.1", allow_private=True).addresses("h", 80)


async def test_no_address_is_an_unknown_host() -> None:
    with pytest.raises(HostUnknown):
        await resolver().addresses("h", 80)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("example.com", True),
        ("img.example.com", True),
        ("badexample.com", False),
        ("example.com.evil.net", False),
        ("other.org", True),
        ("1.2.3.4", False),
    ],
)
def test_an_allowed_domain_covers_itself_and_what_is_below(host: str, allowed: bool) -> None:
    assert domain_allowed(host, ("Example.com", ".other.org")) is allowed


def test_no_allowed_domains_allow_all() -> None:
    assert domain_allowed("anything.example", ())
