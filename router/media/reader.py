"""The encoded bytes of one item, wherever they come from, with their reservation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.faults import Fault, Reason
from router.media import dataurl, localfile
from router.media.budget import Amount, Budget, Reservation
from router.media.cache import Held, UrlCache
from router.media.fetch import Fetcher
from router.media.header import ImageHeader
from router.media.limits import MediaLimits
from router.media.pool import PixelPool
from router.media.signed import object_name, short_name
from router.media.sizes import Sizes
from router.media.sniff import sniff
from router.media.source import MediaSource
from router.media.url import MediaUrl, parse
from router.media.video import check_container

# Below this, base64 and a digest take less time than the way to a thread and back.
SMALL = 512 * 1024
# Percent signs are undone by Python, which also walks over the parts of a file's header.
_SMALL_ESCAPED = 32 * 1024


# Names content by its bytes.
Digest = Callable[[bytes], str]


@dataclass(frozen=True, slots=True)
class Glance:
    """What can be said of a reference without fetching it.

    `size` is an image's upright (width, height), and `certain` says that it
    is the very image's, which was at hand. `name` is that of the content where
    it was at hand (`named_by_content`), else that of the reference without
    its signature; empty where nobody asked for it.
    """

    size: tuple[int, int] | None = None
    certain: bool = False
    name: str = ""
    named_by_content: bool = False


class Reader:
    """Reads and judges references."""

    def __init__(
        self,
        limits: MediaLimits,
        budget: Budget,
        pool: PixelPool,
        fetcher: Fetcher,
        downloads: UrlCache,
        sizes: Sizes,
    ) -> None:
        self._limits = limits
        self._budget = budget
        self._pool = pool
        self._fetcher = fetcher
        self._downloads = downloads
        self._sizes = sizes

    async def judge(
        self, source: MediaSource, index: int, *, measure: bool, digest: Digest | None
    ) -> Glance:
        """Everything `read` would refuse before it fetches, and what can be seen by then.

        See `MediaIntake.judge`. Raises Fault.
        """
        if source.url is None:
            raise Fault.of_item(
                Reason.MULTIMODAL_UNSUPPORTED_PART, index, "inline bytes cannot be forwarded"
            )
        url = parse(source.url, index=index)
        if url.scheme == "data":
            reservation = self._budget.open()
            try:
                return await self._judge_data(url, source, index, digest, reservation)
            finally:
                reservation.release()
        if url.scheme == "file":
            nbytes = await self._pool.run(
                (), localfile.size, self._limits.local_root, url, index=index
            )
            _check_size(nbytes, self._max_bytes(source), index)
            return Glance(name=short_name(source.url) if digest is not None else "")
        if not url.ascii_host:
            # The worker would translate the name by rules of its own.
            raise Fault.of_item(
                Reason.MEDIA_URL_INVALID,
                index,
                "a host that a worker is to ask must be given in its ASCII (xn--) form",
            )
        await self._fetcher.judge_addresses(url, index)
        asks = measure and source.modality == "image"
        return Glance(
            size=await self._sizes.get(url, index=index) if asks else None,
            name=object_name(url) if digest is not None else "",
        )

    async def _judge_data(
        self,
        url: MediaUrl,
        source: MediaSource,
        index: int,
        digest: Digest | None,
        reservation: Reservation,
    ) -> Glance:
        data = await self._data_url(url, source, index, reservation)
        size = None
        if source.modality == "image":
            header = await self._sniff(data, index, reservation)
            size = header.width, header.height
        else:
            check_container(data, index=index)
        name = await self._digest(digest, data, reservation) if digest is not None else ""
        return Glance(size, size is not None, name, named_by_content=bool(name))

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
        limit = self._max_bytes(source)
        bound = dataurl.check_length(url, limit=limit, index=index)
        await reservation.grow(Amount(nbytes=bound), index=index)
        data = await self._decode(url, index, reservation)
        dataurl.check_size(len(data), limit=limit, index=index)
        reservation.shrink_to(Amount(nbytes=len(data)))
        return data

    async def _decode(self, url: MediaUrl, index: int, held: Reservation) -> bytes:
        small = len(url.text) <= _SMALL_ESCAPED
        if small or (len(url.text) <= SMALL and dataurl.is_plain_base64(url)):
            return dataurl.decode(url, index=index)
        return await self._pool.run((held,), dataurl.decode, url, index=index)

    async def _sniff(self, data: bytes, index: int, held: Reservation) -> ImageHeader:
        limits = self._limits
        max_pixels, formats = limits.max_pixels, limits.formats
        if len(data) <= _SMALL_ESCAPED:
            return sniff(data, max_pixels=max_pixels, index=index, formats=formats)
        return await self._pool.run(
            (held,), sniff, data, max_pixels=max_pixels, index=index, formats=formats
        )

    async def _digest(self, digest: Digest, data: bytes, held: Reservation) -> str:
        if len(data) <= SMALL:
            return digest(data)
        return await self._pool.run((held,), digest, data)

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
