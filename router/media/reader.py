"""The encoded bytes of one item, wherever they come from, with their reservation."""

from __future__ import annotations

from router.faults import Fault, Reason
from router.media import dataurl, localfile
from router.media.budget import Amount, Budget, Reservation
from router.media.cache import Held, UrlCache
from router.media.fetch import Fetcher
from router.media.header import ImageHeader
from router.media.limits import MediaLimits
from router.media.pool import PixelPool
from router.media.sniff import sniff
from router.media.source import MediaSource
from router.media.url import MediaUrl, parse
from router.media.video import check_container

# Below this, base64 takes less time than the way to a thread and back.
_SMALL = 32 * 1024


class Reader:
    """Reads and judges references."""

    def __init__(
        self,
        limits: MediaLimits,
        budget: Budget,
        pool: PixelPool,
        fetcher: Fetcher,
        downloads: UrlCache,
    ) -> None:
        self._limits = limits
        self._budget = budget
        self._pool = pool
        self._fetcher = fetcher
        self._downloads = downloads

    async def judge(self, source: MediaSource, index: int) -> ImageHeader | None:
        """Everything `read` would refuse before it fetches, and the header of an image at hand.

        The header is that of an image in a data: URL; what lies elsewhere is
        not read. Raises Fault.
        """
        if source.url is None:
            raise Fault.of_item(
                Reason.MULTIMODAL_UNSUPPORTED_PART, index, "inline bytes cannot be forwarded"
            )
        url = parse(source.url, index=index)
        if url.scheme == "data":
            dataurl.check_length(url, limit=self._limits.max_data_url_bytes, index=index)
            data = await self._decode(url, index)
            _check_size(len(data), self._max_bytes(source), index)
            if source.modality == "image":
                limits = self._limits
                return sniff(
                    data, max_pixels=limits.max_pixels, index=index, formats=limits.formats
                )
            check_container(data, index=index)
        elif url.scheme == "file":
            size = await self._pool.run(
                (), localfile.size, self._limits.local_root, url, index=index
            )
            _check_size(size, self._max_bytes(source), index)
        else:
            if not url.ascii_host:
                # The worker would translate the name by rules of its own.
                raise Fault.of_item(
                    Reason.MEDIA_URL_INVALID,
                    index,
                    "a host that a worker is to ask must be given in its ASCII (xn--) form",
                )
            await self._fetcher.judge_addresses(url, index)
        return None

    async def read(self, source: MediaSource, index: int) -> Held:
        """The whole item; the caller releases the reservation. Raises Fault."""
        url = parse(source.url or "", index=index) if source.data is None else None
        if url is not None and url.is_remote:
            return await self._downloads.get(
                url,
                index=index,
                max_bytes=self._max_bytes(source),
                timeout=self._timeout(source),
            )
        reservation = self._budget.open()
        try:
            if url is None:
                data = await self._inline(source, index, reservation)
            elif url.scheme == "data":
                data = await self._data_url(url, source, index, reservation)
            else:
                data = await self._file(url, source, index, reservation)
        except BaseException:
            reservation.release()
            raise
        return Held(data, reservation)

    async def _inline(self, source: MediaSource, index: int, reservation: Reservation) -> bytes:
        data = source.data or b""
        _check_size(len(data), self._max_bytes(source), index)
        await reservation.grow(Amount(nbytes=len(data)), index=index)
        return data

    async def _data_url(
        self, url: MediaUrl, source: MediaSource, index: int, reservation: Reservation
    ) -> bytes:
        bound = dataurl.check_length(url, limit=self._limits.max_data_url_bytes, index=index)
        await reservation.grow(Amount(nbytes=bound), index=index)
        data = await self._decode(url, index, reservation)
        _check_size(len(data), self._max_bytes(source), index)
        reservation.shrink_to(Amount(nbytes=len(data)))
        return data

    async def _decode(self, url: MediaUrl, index: int, *held: Reservation) -> bytes:
        if len(url.text) <= _SMALL:
            return dataurl.decode(url, index=index)
        return await self._pool.run(held, dataurl.decode, url, index=index)

    async def _file(
        self, url: MediaUrl, source: MediaSource, index: int, reservation: Reservation
    ) -> bytes:
        root = self._limits.local_root
        size = await self._pool.run((), localfile.size, root, url, index=index)
        _check_size(size, self._max_bytes(source), index)
        await reservation.grow(Amount(nbytes=size), index=index)
        return await self._pool.run(
            (reservation,), localfile.read, root, url, size=size, index=index
        )

    def _max_bytes(self, source: MediaSource) -> int:
        if source.modality == "video":
            return self._limits.video.max_bytes
        return self._limits.max_image_bytes

    def _timeout(self, source: MediaSource) -> float:
        fetch = self._limits.fetch
        return fetch.video_timeout if source.modality == "video" else fetch.image_timeout


def _check_size(size: int, limit: int, index: int) -> None:
    if size > limit:
        raise Fault.of_item(
            Reason.MEDIA_TOO_LARGE,
            index,
            f"the item has {size} bytes, the limit is {limit}",
            size=size,
            limit=limit,
        )
