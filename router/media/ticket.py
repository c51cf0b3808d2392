"""One request's share of the media budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec, Self, TypeVar

from router.media import video
from router.media.budget import Amount, Budget, Reservation, too_large
from router.media.decode import Pixels, is_hard
from router.media.decoder import Decoder
from router.media.header import ImageHeader
from router.media.limits import MediaLimits
from router.media.pool import PixelPool
from router.media.reader import Reader
from router.media.sniff import sniff
from router.media.source import MediaSource
from router.media.url import MAX_URL_LENGTH
from router.media.video_header import VideoHeader

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Blob:
    """One encoded image, whole, its header read and its limits judged."""

    index: int
    data: bytes
    header: ImageHeader
    # Decoded in a process of its own.
    hard: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Clip:
    """One encoded clip, whole, its header read and its limits judged."""

    index: int
    data: bytes
    header: VideoHeader


class Ticket:
    """What one request loaded and decoded, and what that takes of the budget.

    Whatever way the request ends, `close` gives everything back, except what a
    thread still works on: that is given back when the thread ends.
    """

    def __init__(
        self,
        limits: MediaLimits,
        budget: Budget,
        pool: PixelPool,
        reader: Reader,
        decoder: Decoder,
        on_sniff: Callable[[float], None],
    ) -> None:
        self._limits = limits
        self._budget = budget
        self._pool = pool
        self._reader = reader
        self._decoder = decoder
        self._on_sniff = on_sniff
        self._held: list[Reservation] = []
        self._used = Amount()
        # Items whose pixels are reserved.
        self._pixels: set[int] = set()
        self._images: dict[str, Blob] = {}
        self._closed = False
        # The first item that was cancelled while its host was to deliver it.
        self.unfetched: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def used(self) -> Amount:
        """What the request holds."""
        return self._used

    async def load(self, source: MediaSource, index: int) -> Blob:
        """Fetches or unpacks one image and judges its header; decodes nothing.

        The same URL twice in a request is fetched once. Raises Fault: any
        MEDIA_ reason but MEDIA_ASPECT_RATIO, and FILE_FORBIDDEN.
        """
        # A data: URL is not looked up: it is the picture, and megabytes to hash.
        url = source.url if source.url and len(source.url) <= MAX_URL_LENGTH else None
        known = self._images.get(url) if url is not None else None
        if known is not None:
            return replace(known, index=index)
        data = await self._read(source, index)
        began = time.monotonic()
        header, hard = await self._pool.run(self._held, self._look, data, index)
        self._on_sniff(time.monotonic() - began)
        blob = Blob(index, data, header, hard)
        if url is not None:
            self._images[url] = blob
        return blob

    async def decode(self, blob: Blob) -> Pixels:
        """Decodes one image.

        Returns uint8 [height, width, 3], RGB, upright, C-contiguous. Raises
        Fault MEDIA_DECODE_FAILED, MEDIA_TOO_LARGE, MEDIA_BUDGET_FULL.
        """
        if blob.index not in self._pixels:
            await self._take_pixels(blob.header.pixels, blob.index)
        return await self._decoder.image(
            self._held, blob.data, blob.header, hard=blob.hard, index=blob.index
        )

    async def decode_within(self, blob: Blob, work: Callable[[Callable[[], Pixels]], T]) -> T:
        """What `work` makes of one image that is not hard, on one way to a thread and back.

        `work` is given what decodes the image. Raises as `decode`.
        """
        assert not blob.hard, "a hard image is decoded in a process of its own"
        if blob.index not in self._pixels:
            await self._take_pixels(blob.header.pixels, blob.index)
        return await self._decoder.within(
            self._held, work, blob.data, blob.header, index=blob.index
        )

    async def load_clip(self, source: MediaSource, index: int) -> Clip:
        """Fetches or unpacks one clip and judges its header. Raises as `load`."""
        data = await self._read(source, index)
        video.check_container(data, index=index)
        return Clip(index, data, await self._decoder.clip(self._held, data, index=index))

    async def frames(self, clip: Clip, indices: Sequence[int]) -> Pixels:
        """Decodes the frames at `indices`, which must be in order.

        Returns uint8 [n, height, width, 3], RGB. Raises Fault MEDIA_DECODE_FAILED,
        MEDIA_TOO_LARGE, MEDIA_BUDGET_FULL; ValueError for indices outside the clip.
        """
        pixels = video.check_frames(clip.header, indices, self._limits.video, index=clip.index)
        await self._take_pixels(pixels, clip.index)
        return await self._decoder.frames(
            self._held, clip.data, clip.header, indices, index=clip.index
        )

    async def take_bytes(self, nbytes: int, index: int) -> None:
        """Reserves memory that item `index` takes beside its file and its pixels: its tensor.

        Raises Fault MEDIA_TOO_LARGE, MEDIA_BUDGET_FULL.
        """
        amount = Amount(nbytes=nbytes)
        self._charge(amount, index)
        reservation = self._budget.open()
        self._hold(reservation)
        await reservation.grow(amount, index=index)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs other blocking pixel work in the same bounded pool.

        What the request holds stays reserved until the thread is done with it.
        """
        return await self._pool.run(self._held, work, *args, **kwargs)

    def close(self) -> None:
        """Lets go of everything."""
        self._closed = True
        while self._held:
            self._held.pop().release()

    def _look(self, data: bytes, index: int) -> tuple[ImageHeader, bool]:
        limits = self._limits
        header = sniff(data, max_pixels=limits.max_pixels, index=index, formats=limits.formats)
        return header, is_hard(data, header)

    async def _read(self, source: MediaSource, index: int) -> bytes:
        try:
            download = await self._reader.read(source, index)
        except asyncio.CancelledError:
            if self.unfetched is None and source.is_hosted:
                self.unfetched = index
            raise
        # Of a reference that stands twice in the request there is one download.
        shared = download.reservation in self._held
        self._hold(download.reservation)
        if not shared:
            self._charge(download.reservation.amount, index)
        return download.data

    async def _take_pixels(self, pixels: int, index: int) -> None:
        amount = Amount(pixels=pixels)
        self._charge(amount, index)
        reservation = self._budget.open()
        self._hold(reservation)
        self._pixels.add(index)
        await reservation.grow(amount, index=index)

    def _hold(self, reservation: Reservation) -> None:
        if self._closed:
            # A task of the request that outlives it.
            reservation.release()
            raise RuntimeError("the ticket is closed")
        self._held.append(reservation)

    def _charge(self, amount: Amount, index: int) -> None:
        limits = self._limits
        used, limit = self._used + amount, Amount(limits.request_bytes, limits.request_pixels)
        if not used.fits(limit):
            raise too_large(index, "one request", used, limit)
        self._used = used
