"""Identities of media items."""

from __future__ import annotations

import struct

from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from router.vision.identity import item_identity
from tests.vision.pictures import DATA


def framed(part: bytes) -> bytes:
    return struct.pack("<Q", len(part)) + part


def test_a_plain_picture_has_the_identity_that_vllm_gives_it() -> None:
    data, model = b"\xff\xd8not really a jpeg", "org/model"
    expected = (framed(b"image") + b"\x03" + framed(b"image") + b"\x03" + framed(data)) + (
        framed(b"model_id") + b"\x03" + framed(model.encode())
    )
    assert item_identity("image", data, model) == blake3(expected).hexdigest()
    assert item_identity("image", data, model, [""]) == blake3(expected).hexdigest()
    assert item_identity("image", memoryview(data), model) == blake3(expected).hexdigest()


def test_a_file_has_the_identity_that_vllm_0_32_computed() -> None:
    raw = (DATA / "images" / "photo_161x184_444.jpg").read_bytes()
    expected = "9cbb168356673a67b871f14a29562fe7976df3eb4eff2c72b9e086b5d837bc9b"
    assert item_identity("image", raw, "org/m") == expected


def test_everything_that_changes_pixels_changes_the_identity() -> None:
    identities = [
        item_identity("image", b"a", "m"),
        item_identity("image", b"b", "m"),
        item_identity("image", b"a", "n"),
        item_identity("video", b"a", "m"),
        item_identity("image", b"a", "m", ["max_long_side=500"]),
        item_identity("image", b"a", "m", ["max_long_side=501"]),
        item_identity("image", b"a", "m", ["max_long_side=500", "fps=1"]),
    ]
    assert len(set(identities)) == len(identities)
    assert all(len(i) == 64 for i in identities)


@given(st.binary(max_size=20), st.text(max_size=20), st.binary(max_size=20), st.text(max_size=20))
def test_parts_do_not_run_into_each_other(a: bytes, m: str, b: bytes, n: str) -> None:
    same = item_identity("image", a, m) == item_identity("image", b, n)
    assert same == ((a, m) == (b, n))


def test_the_order_of_changes_does_not_matter() -> None:
    assert item_identity("video", b"a", "m", ["x", "y"]) == item_identity(
        "video", b"a", "m", ["y", "x"]
    )
