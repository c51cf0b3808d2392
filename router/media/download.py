"""One download in the making: what was asked for, its body within its limits, its faults."""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp

from router.faults import Fault, Reason
from router.media.budget import Amount, Reservation
from router.media.url import MediaUrl

READ_SIZE = 64 * 1024
_FIRST_STEP = 256 * 1024
_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


@dataclass(frozen=True, slots=True)
class Validators:
    """What a conditional request carries, from an earlier answer."""

    etag: str | None = None
    last_modified: str | None = None


@dataclass(frozen=True, slots=True)
class Download:
    url: MediaUrl
    index: int
    max_bytes: int
    reservation: Reservation
    validators: Validators | None

    def conditions(self) -> dict[str, str]:
        """The headers that make the request conditional."""
        if self.validators is None:
            return {}
        if self.validators.etag:
            return {"If-None-Match": self.validators.etag}
        if self.validators.last_modified:
            return {"If-Modified-Since": self.validators.last_modified}
        return {}


class Retry(Exception):
    """This attempt failed in a way that another may not."""


async def read_body(response: aiohttp.ClientResponse, download: Download) -> bytes:
    reservation, reserved = download.reservation, download.reservation.amount.nbytes
    buffer = io.BytesIO()
    async for chunk in _decompressed(response, download):
        size = buffer.tell() + len(chunk)
        if size > download.max_bytes:
            raise too_large(download)
        if size > reserved:
            step = min(max(_FIRST_STEP, reserved, size - reserved), download.max_bytes - reserved)
            await reservation.grow(Amount(nbytes=step), index=download.index)
            reserved += step
        buffer.write(chunk)
    # getvalue() hands out the buffer itself, without a copy.
    data = buffer.getvalue()
    reservation.shrink_to(Amount(nbytes=len(data)))
    return data


async def _decompressed(
    response: aiohttp.ClientResponse, download: Download
) -> AsyncIterator[bytes]:
    """The body's chunks, unpacked where the host packed them unasked.

    A packed body is unpacked in small steps, each bounded, so that a bomb is
    noticed at the limit and not in memory.
    """
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        async for chunk in response.content.iter_chunked(READ_SIZE):
            yield chunk
        return
    if encoding not in _ENCODINGS:
        raise failed(download.url, download.index, "its answer has an unknown content encoding")
    unpacker = zlib.decompressobj(wbits=_ENCODINGS[encoding])
    try:
        async for packed in response.content.iter_chunked(READ_SIZE):
            while packed:
                yield unpacker.decompress(packed, READ_SIZE)
                packed = unpacker.unconsumed_tail
                # A bomb unpacks a thousand times its size: let others run in between.
                await asyncio.sleep(0)
                if unpacker.eof:
                    # It would keep whatever else the host sends, and nobody counts that.
                    return
        yield unpacker.flush()
    except zlib.error:
        raise failed(download.url, download.index, "its answer is damaged") from None
    if not unpacker.eof:
        raise Retry("the answer ended early")


def failed(url: MediaUrl, index: int, why: str) -> Fault:
    return Fault.of_item(
        Reason.MEDIA_FETCH_FAILED,
        index,
        f"the host {url.host} could not be fetched from: {why}",
        host=url.host,
    )


def timed_out(url: MediaUrl, index: int, seconds: float) -> Fault:
    return Fault.of_item(
        Reason.MEDIA_FETCH_TIMEOUT,
        index,
        f"the host {url.host} did not deliver within {seconds:g} s",
        host=url.host,
        limit=f"{seconds:g}",
    )


def too_large(download: Download) -> Fault:
    return Fault.of_item(
        Reason.MEDIA_TOO_LARGE,
        download.index,
        f"the download is over the limit of {download.max_bytes} bytes",
        limit=download.max_bytes,
    )
