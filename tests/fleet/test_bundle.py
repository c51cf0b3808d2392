"""Archives from strangers: read under limits, or refused as `BundleError`."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from router.fleet import bundle
from router.fleet.bundle import BundleError, TokenizerBundle, fetch_bundle, read_bundle
from router.wire import common


def archive(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as writer:
        for name, content in files.items():
            writer.writestr(name, content)
    return packed.getvalue()


async def chunks(*data: bytes, sha256: str = "") -> AsyncIterator[common.GetTokenizerChunk]:
    for part in data:
        yield common.GetTokenizerChunk(data=part)
    yield common.GetTokenizerChunk(sha256=sha256)


def test_members_are_found_by_base_name() -> None:
    data = archive({"config.json": b"{}", "model/tokenizer.json": b"[]"})
    read = TokenizerBundle.from_archive(data)
    assert read.files == {"config.json": b"{}", "tokenizer.json": b"[]"}
    assert read.names == ("config.json", "tokenizer.json")
    assert read.sha256 == hashlib.sha256(data).hexdigest()
    assert read.archive == data


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a\\..\\x", "\\\\host\\x"])
def test_a_member_outside_the_archives_folder_is_refused(name: str) -> None:
    with pytest.raises(BundleError, match="outside"):
        TokenizerBundle.from_archive(archive({name: b"x"}))


def test_too_many_members_are_refused() -> None:
    files = {f"{i}": b"" for i in range(bundle.MAX_MEMBERS + 1)}
    with pytest.raises(BundleError, match="members"):
        TokenizerBundle.from_archive(archive(files))


def test_a_bomb_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_UNPACKED_BYTES", 1 << 20)
    for files in ({"a": bytes(2 << 20)}, {f"{i}": bytes(300 << 10) for i in range(4)}):
        data = archive(files)
        assert len(data) < 10_000
        with pytest.raises(BundleError, match="unpacks"):
            TokenizerBundle.from_archive(data)


def test_the_directorys_own_word_for_a_size_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_UNPACKED_BYTES", 1 << 20)
    data = bytearray(archive({"a": bytes(2 << 20)}))
    # The sizes in the central directory and in the local header say 10 bytes.
    for signature, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        at = data.find(signature) + offset
        data[at : at + 4] = (10).to_bytes(4, "little")
    with pytest.raises(BundleError):
        TokenizerBundle.from_archive(bytes(data))


def test_an_archive_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_PACKED_BYTES", 100)
    with pytest.raises(BundleError, match="bytes"):
        TokenizerBundle.from_archive(bytes(101))


async def test_a_stream_that_goes_on_for_ever_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_PACKED_BYTES", 1000)
    sent = 0

    async def endless() -> AsyncIterator[common.GetTokenizerChunk]:
        nonlocal sent
        while True:
            sent += 1
            yield common.GetTokenizerChunk(data=bytes(100))

    with pytest.raises(BundleError, match="over"):
        await read_bundle(endless())
    assert sent == 11


async def test_a_worker_that_sends_nothing_is_not_waited_for_as_long_as_for_an_archive() -> None:
    cancelled = False

    class Silent:
        """A call whose second chunk never comes."""

        async def __aiter__(self) -> AsyncIterator[common.GetTokenizerChunk]:
            yield common.GetTokenizerChunk(data=b"PK")
            await asyncio.Event().wait()

        def cancel(self) -> None:
            nonlocal cancelled
            cancelled = True

    stub = SimpleNamespace(GetTokenizer=lambda *_, **__: Silent())
    with pytest.raises(BundleError, match=r"GetTokenizer sent nothing for 0\.01s"):
        await fetch_bundle(stub, idle=0.01)
    assert cancelled


async def test_chunks_are_joined_and_their_checksum_counts() -> None:
    data = archive({"config.json": b"{}"})
    right = hashlib.sha256(data).hexdigest()
    for sha256 in (right, right.upper(), ""):
        read = await read_bundle(chunks(data[:10], data[10:], sha256=sha256))
        assert read.files == {"config.json": b"{}"}
    with pytest.raises(BundleError, match="sha256"):
        await read_bundle(chunks(data, sha256="0" * 64))


@pytest.mark.parametrize("data", [b"", b"PK", b"not a zip" * 100])
def test_what_is_no_archive_is_refused(data: bytes) -> None:
    with pytest.raises(BundleError):
        TokenizerBundle.from_archive(data)


_FILES = {"config.json": b'{"a": 1}' * 20, "tokenizer.json": bytes(range(256))}
_SAMPLES = [
    archive(_FILES, method)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
]


@settings(max_examples=200)
@given(
    sample=st.sampled_from(_SAMPLES),
    changes=st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4
    ),
    cut=st.integers(0, 400),
)
def test_a_damaged_archive_is_read_or_refused_but_never_anything_else(
    sample: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(sample)
    for at, value in changes:
        data[at % len(data)] = value
    try:
        read = TokenizerBundle.from_archive(bytes(data[: len(data) - cut % 50]))
    except BundleError:
        return
    assert all(isinstance(content, bytes) for content in read.files.values())
