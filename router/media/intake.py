"""The door of the room: references in, upright RGB out, within the budget.

    async with intake.ticket() as ticket:
        blob = await ticket.load(source, index=0)
        pixels = await ticket.decode(blob)

A ticket is one request's share of the budget. Whatever way the request ends,
leaving the ticket gives every byte and pixel back; only a thread that is still
at work after a cancel keeps its part until it ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

from router.faults import Fault, Reason
from router.media import dataurl, localfile
from router.media.budget import Amount, Budget, Reservation, too_large
from router.media.decode import Pixels, decode
from router.media.fetch import Fetcher
from router.media.header import ImageHeader
from router.media.limits import MediaLimits
from router.media.pool import PixelPool
from router.media.resolve import PublicResolver
from router.media.sniff import sniff
from router.media.url import MediaUrl, parse

P = ParamSpec("P")
T = TypeVar("T")
Modality = Literal["image", "video"]

# Below this, base64 takes less time than the way to a thread and back.
_SMALL = 32 * 1024


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One media item of a request: a reference, or the bytes themselves."""

    modality: Modality
    url: str | None = None
    data: bytes | None = None

    def __repr__(self) -> str:
        # Neither the reference nor the bytes belong into a log.
        size = len(self.data) if self.data is not None else len(self.url or "")
        return f"MediaSource({self.modality}, {'data' if self.data is not None else 'url'}, {size})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Blob:
    """One encoded image, whole, with its header read and its limits judged."""

    index: int
    data: bytes
    header: ImageHeader


class MediaIntake:
    """Everything between a media reference and pixels, for the whole process."""

    def __init__(
        self, limits: MediaLimits | None = None, *, resolver: PublicResolver | None = None
    ) -> None:
        self.limits = limits or MediaLimits()
        fetch = self.limits.fetch
        self.budget = Budget(
            Amount(self.limits.budget_bytes, self.limits.budget_pixels),
            wait=self.limits.budget_wait,
            retry_after=self.limits.budget_retry_after,
        )
        self._pool = PixelPool(self.limits.worker_threads)
        self._fetcher = Fetcher(
            fetch,
            resolver
            or PublicResolver(
                allow_private=fetch.allow_private_hosts,
                timeout=fetch.connect_timeout,
                threads=fetch.resolver_threads,
            ),
        )

    async def warm_up(self) -> None:
        """Makes now what is otherwise made with the first download."""
        await self._fetcher.warm_up()

    async def close(self) -> None:
        """Closes connections and waits for the threads."""
        await self._fetcher.close()
        await self._pool.close()

    async def judge(self, source: MediaSource, index: int) -> None:
        """Everything a reference must pass before it is forwarded to a worker; fetches nothing.

        Raises Fault MEDIA_URL_INVALID, MEDIA_SCHEME_UNSUPPORTED,
        MEDIA_HOST_FORBIDDEN, MEDIA_REF_TOO_LARGE, FILE_FORBIDDEN,
        MEDIA_NOT_FOUND, MEDIA_FETCH_FAILED, MEDIA_FETCH_TIMEOUT.
        """
        if source.url is None:
            raise Fault.of_item(
                Reason.MULTIMODAL_UNSUPPORTED_PART, index, "inline bytes cannot be forwarded"
            )
        url = parse(source.url, index=index)
        if url.scheme == "data":
            bound = dataurl.check_length(url, limit=self.limits.max_data_url_bytes, index=index)
            if bound <= _SMALL:
                dataurl.decode(url, index=index)
            else:
                await self._pool.run((), dataurl.decode, url, index=index)
        elif url.scheme == "file":
            await self._pool.run((), localfile.size, self.limits.local_root, url, index=index)
        else:
            if not url.ascii_host:
                # The worker would translate the name by rules of its own.
                raise Fault.of_item(
                    Reason.MEDIA_URL_INVALID,
                    index,
                    "a host to be asked by a worker must be given in its ASCII (xn--) form",
                )
            await self._fetcher.judge_addresses(url, index)

    @asynccontextmanager
    async def ticket(self) -> AsyncIterator[Ticket]:
        """The budget scope of one request."""
        ticket = Ticket(self, self._pool)
        try:
            yield ticket
        finally:
            ticket.close()

    async def read(
        self, source: MediaSource, index: int, *, max_bytes: int, timeout: float
    ) -> tuple[bytes, Reservation]:
        """The encoded bytes of one item, and the reservation that accounts for them."""
        reservation = self.budget.open()
        try:
            data = await self._read(source, index, max_bytes, timeout, reservation)
        except BaseException:
            reservation.release()
            raise
        return data, reservation

    async def _read(
        self,
        source: MediaSource,
        index: int,
        max_bytes: int,
        timeout: float,
        reservation: Reservation,
    ) -> bytes:
        if source.data is not None:
            _check_size(len(source.data), max_bytes, index)
            await reservation.grow(Amount(nbytes=len(source.data)), index=index)
            return source.data
        url = parse(source.url or "", index=index)
        if url.scheme == "data":
            return await self._read_data_url(url, index, max_bytes, reservation)
        if url.scheme == "file":
            return await self._read_file(url, index, max_bytes, reservation)
        response = await self._fetcher.fetch(
            url, index=index, max_bytes=max_bytes, timeout=timeout, reservation=reservation
        )
        assert response.data is not None
        return response.data

    async def _read_data_url(
        self, url: MediaUrl, index: int, max_bytes: int, reservation: Reservation
    ) -> bytes:
        bound = dataurl.check_length(url, limit=self.limits.max_data_url_bytes, index=index)
        await reservation.grow(Amount(nbytes=bound), index=index)
        if bound <= _SMALL:
            data = dataurl.decode(url, index=index)
        else:
            data = await self._pool.run((reservation,), dataurl.decode, url, index=index)
        _check_size(len(data), max_bytes, index)
        reservation.shrink_to(Amount(nbytes=len(data)))
        return data

    async def _read_file(
        self, url: MediaUrl, index: int, max_bytes: int, reservation: Reservation
    ) -> bytes:
        root = self.limits.local_root
        size = await self._pool.run((), localfile.size, root, url, index=index)
        _check_size(size, max_bytes, index)
        await reservation.grow(Amount(nbytes=size), index=index)
        return await self._pool.run(
            (reservation,), localfile.read, root, url, size=size, index=index
        )


class Ticket:
    """One request's media: what it loaded, what it decoded, what that takes of the budget."""

    def __init__(self, intake: MediaIntake, pool: PixelPool) -> None:
        self._intake = intake
        self._pool = pool
        self._held: list[Reservation] = []
        self._used = Amount()

    async def load(self, source: MediaSource, index: int) -> Blob:
        """Fetches or unpacks one image and judges its header; decodes nothing.

        Raises Fault with every MEDIA_ reason that `url`, `fetch`, `dataurl`,
        `localfile`, `sniff` and `budget` name.
        """
        limits = self._intake.limits
        data, reservation = await self._intake.read(
            source, index, max_bytes=limits.max_image_bytes, timeout=limits.fetch.image_timeout
        )
        self._held.append(reservation)
        self._charge(reservation.amount, index)
        header = sniff(data, max_pixels=limits.max_pixels, index=index)
        return Blob(index, data, header)

    async def decode(self, blob: Blob) -> Pixels:
        """Decodes one image.

        Returns uint8 [height, width, 3], RGB, upright, C-contiguous. Raises
        Fault MEDIA_DECODE_FAILED, MEDIA_TOO_LARGE, MEDIA_BUDGET_FULL.
        """
        amount = Amount(pixels=blob.header.pixels)
        self._charge(amount, blob.index)
        reservation = self._intake.budget.open()
        self._held.append(reservation)
        await reservation.grow(amount, index=blob.index)
        return await self._pool.run(self._held, decode, blob.data, blob.header, blob.index)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs other blocking pixel work in the same bounded pool.

        What the request holds stays reserved until the thread is done.
        """
        return await self._pool.run(self._held, work, *args, **kwargs)

    def close(self) -> None:
        """Lets go of everything."""
        while self._held:
            self._held.pop().release()

    def _charge(self, amount: Amount, index: int) -> None:
        limits = self._intake.limits
        used, limit = self._used + amount, Amount(limits.request_bytes, limits.request_pixels)
        if not used.fits(limit):
            raise too_large(index, "one request", used, limit)
        self._used = used


def _check_size(size: int, limit: int, index: int) -> None:
    if size > limit:
        raise Fault.of_item(
            Reason.MEDIA_TOO_LARGE,
            index,
            f"the item has {size} bytes, the limit is {limit}",
            size=size,
            limit=limit,
        )
