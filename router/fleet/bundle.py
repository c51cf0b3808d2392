"""The tokenizer and processor files of a model, as a worker hands them out.

GetTokenizer streams a zip archive. It comes from another machine, so it is
read under limits: size packed and unpacked, number of members, plain names.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Protocol

from router.wire import common

MAX_PACKED_BYTES = 200 << 20
MAX_UNPACKED_BYTES = 500 << 20
MAX_MEMBERS = 50

# What zipfile and the decompressors under it raise for bytes that make no sense.
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    IndexError,
    NotImplementedError,
    OSError,
    ValueError,
)


class BundleError(ValueError):
    """The archive is damaged, over a limit, or not what its checksum says."""


@dataclass(frozen=True)
class TokenizerBundle:
    """The archive's members by base name, and the archive as it came.

    `sha256` (hex) is of the packed archive, `content` (hex SHA-256) of the files in
    it: archives of the same files differ in the times of their members.
    """

    files: Mapping[str, bytes] = field(repr=False)
    archive: bytes = field(repr=False)
    sha256: str
    content: str = ""

    @classmethod
    def from_archive(cls, data: bytes) -> TokenizerBundle:
        """Unpacks a zip archive in memory. Raises `BundleError`."""
        if len(data) > MAX_PACKED_BYTES:
            raise BundleError(f"the archive has {len(data)} bytes, over {MAX_PACKED_BYTES}")
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                files = _unpack(archive)
        except BundleError:
            raise
        except _DAMAGED as error:
            raise BundleError("the archive is damaged") from error
        except RuntimeError as error:  # an encrypted member
            raise BundleError("the archive has a member that cannot be read") from error
        return cls(files, data, hashlib.sha256(data).hexdigest(), digest(files))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The members' names, sorted."""
        return tuple(sorted(self.files))


def digest(files: Mapping[str, bytes]) -> str:
    """Hex SHA-256 over names and contents."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def _unpack(archive: zipfile.ZipFile) -> dict[str, bytes]:
    members = [info for info in archive.infolist() if not info.is_dir()]
    if len(members) > MAX_MEMBERS:
        raise BundleError(f"the archive has {len(members)} members, over {MAX_MEMBERS}")
    files: dict[str, bytes] = {}
    budget = MAX_UNPACKED_BYTES
    for info in members:
        path = PurePosixPath(info.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in info.filename:
            raise BundleError("the archive has a member outside its own folder")
        # The directory's size is only a claim: read one byte past the budget at most.
        with archive.open(info) as member:
            content = member.read(budget + 1)
        if len(content) > budget:
            raise BundleError(f"the archive unpacks to more than {MAX_UNPACKED_BYTES} bytes")
        budget -= len(content)
        files[path.name] = content
    return files


class _TokenizerStub(Protocol):
    # The generated stub, sync or aio, has this attribute; its type is untyped code.
    GetTokenizer: Any


async def fetch_bundle(
    stub: _TokenizerStub, *, timeout: float = 60.0, idle: float = 10.0
) -> TokenizerBundle:
    """Reads GetTokenizer of a `VllmEngineStub` on an aio channel.

    Raises `BundleError`, or `grpc.aio.AioRpcError` when the call fails.
    `timeout` is for all of it and `idle` for each chunk, in seconds: a large
    archive takes its time, and a worker that hangs must not get as much.
    """
    call = stub.GetTokenizer(common.GetTokenizerRequest(), timeout=timeout)
    try:
        return await read_bundle(_coming(call, idle))
    finally:
        call.cancel()


async def _coming(
    chunks: AsyncIterable[common.GetTokenizerChunk], idle: float
) -> AsyncIterator[common.GetTokenizerChunk]:
    """The chunks as they come. Raises `BundleError` when none comes for `idle` seconds."""
    coming = aiter(chunks)
    while True:
        try:
            async with asyncio.timeout(idle):
                chunk = await anext(coming, None)
        except TimeoutError:
            raise BundleError(f"GetTokenizer sent nothing for {idle:g}s") from None
        if chunk is None:
            return
        yield chunk


async def read_bundle(chunks: AsyncIterable[common.GetTokenizerChunk]) -> TokenizerBundle:
    """Joins the chunks, checks size and sha256, and unpacks. Raises `BundleError`."""
    data = bytearray()
    sha256 = ""
    async for chunk in chunks:
        if len(data) + len(chunk.data) > MAX_PACKED_BYTES:
            raise BundleError(f"the archive is over {MAX_PACKED_BYTES} bytes")
        data += chunk.data
        sha256 = chunk.sha256 or sha256
    bundle = await asyncio.to_thread(TokenizerBundle.from_archive, bytes(data))
    if sha256 and sha256.lower() != bundle.sha256:
        raise BundleError("the archive does not match its sha256")
    return bundle
