"""data: URLs, RFC 2397: any header, strict payload, length first."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.faults import Fault, Reason
from router.media import dataurl
from router.media.url import parse


def decode(url: str) -> bytes:
    return dataurl.decode(parse(url, index=0), index=0)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("data:image/png;base64,aGk=", b"hi"),
        ("DATA:image/png;BASE64,aGk=", b"hi"),
        ("data:;base64,aGk=", b"hi"),
        ('data:image/png;charset=utf-8;name="a.png";base64,aGk=', b"hi"),
        ("data:image/png;base64,aGk%3D", b"hi"),
        ("data:image/png;base64,%61Gk=", b"hi"),
        ("data:,hi%20there", b"hi there"),
        ("data:text/plain,a+b", b"a+b"),
        ("data:image/png;base64,", b""),
        ("data:image/png;base64,+/+/", b"\xfb\xff\xbf"),
        ("data:image/png;base64,%2B%2F%2B%2F", b"\xfb\xff\xbf"),
    ],
)
def test_every_form_of_the_header_is_read(url: str, expected: bytes) -> None:
    assert decode(url) == expected


@pytest.mark.parametrize(
    "payload",
    ["aGk", "aGk==", "aG k=", "aGk=\n", "aGk=aGk=", "aGk=x", "a_-k", "=aGk", "aGké", "A", "====",
     "aGk=%0A"],
)  # fmt: skip
def test_sloppy_base64_is_refused(payload: str) -> None:
    with pytest.raises(Fault) as caught:
        decode("data:image/png;base64," + payload)
    assert caught.value.reason is Reason.MEDIA_URL_INVALID
    assert payload not in caught.value.message


def test_a_header_without_comma_is_refused() -> None:
    with pytest.raises(Fault) as caught:
        parse("data:image/png;base64" + "A" * 10000, index=0)
    assert caught.value.reason is Reason.MEDIA_URL_INVALID


def test_the_length_is_judged_before_anything_is_decoded() -> None:
    url = parse("data:image/png;base64," + "!" * 1340, index=2)
    with pytest.raises(Fault) as caught:
        dataurl.check_length(url, limit=1000, index=2)
    assert caught.value.reason is Reason.MEDIA_REF_TOO_LARGE
    assert caught.value.metadata == {"index": "2", "size": "1005", "limit": "1000"}


@pytest.mark.parametrize("size", [998, 999, 1000])
@pytest.mark.parametrize(
    "write",
    [
        lambda data: "data:;base64," + base64.b64encode(data).decode(),
        lambda data: "data:," + "".join(f"%{byte:02x}" for byte in data),
        lambda data: "data:," + "a" * len(data),
    ],
    ids=["base64", "escaped", "plain"],
)
def test_the_limit_is_of_bytes_however_they_are_written(
    size: int, write: Callable[[bytes], str]
) -> None:
    url = parse(write(b"\xff" * size), index=0)
    assert dataurl.check_length(url, limit=size, index=0) >= size
    with pytest.raises(Fault) as caught:
        dataurl.check_length(url, limit=size - 1, index=0)
    assert caught.value.reason is Reason.MEDIA_REF_TOO_LARGE
    assert caught.value.metadata == {"index": "0", "size": str(size), "limit": str(size - 1)}


def test_escaped_base64_at_the_limit_is_let_through() -> None:
    text = base64.b64encode(b"\xff" * 1000).decode()
    url = parse("data:;base64," + quote(text, safe=""), index=0)
    assert "%3D" in url.text
    assert dataurl.check_length(url, limit=1000, index=0) >= 1000


def test_a_long_payload_survives_the_slicing() -> None:
    data = os.urandom(3 * 1024 * 1024 + 7)
    url = "data:;base64," + base64.b64encode(data).decode()
    assert decode(url) == data


def test_padding_between_slices_is_refused() -> None:
    first = base64.b64encode(b"\0" * (768 * 1024 - 1)).decode()
    assert len(first) == 1024 * 1024
    with pytest.raises(Fault):
        decode("data:;base64," + first + "AAAA")


@given(st.binary(max_size=300))
def test_bytes_come_back_as_they_went(data: bytes) -> None:
    text = base64.b64encode(data).decode()
    assert decode("data:image/png;base64," + text) == data
    assert decode("data:image/png;base64," + quote(text, safe="")) == data
    assert decode("data:," + quote(data)) == data
    parsed = parse("data:;base64," + text, index=0)
    assert dataurl.check_length(parsed, limit=10**6, index=0) >= len(data)


@pytest.mark.parametrize("size", [1, 3, 64 * 1024 - 2, 64 * 1024 - 1, 64 * 1024, 200_001])
def test_escapes_stay_whole_wherever_a_slice_ends(size: int) -> None:
    quoted = "".join("%41" if at % 3 == 0 else "b" for at in range(size))
    expected = bytes(0x41 if at % 3 == 0 else 0x62 for at in range(size))
    assert decode(f"data:,{quoted}") == expected


def test_what_nobody_would_percent_encode_is_refused_before_it_is_decoded() -> None:
    url = parse("data:image/png," + "%41" * (2 << 20), index=4)
    with pytest.raises(Fault) as caught:
        dataurl.decode(url, index=4)
    assert caught.value.reason is Reason.MEDIA_REF_TOO_LARGE
    assert caught.value.metadata["index"] == "4"
