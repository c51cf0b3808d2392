"""The door of the room: references in, upright RGB out, within the budget.

with intake.ticket() as ticket:
    blob = await ticket.load(source, index=0)
    pixels = await ticket.decode(blob)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router.media.budget import Amount, Budget
from router.media.cache import ContentCache, UrlCache
from router.media.decode import WHITE
from router.media.decoder import Decoder
from router.media.fetch import Fetcher
from router.media.limits import MediaLimits
from router.media.pool import PixelPool
from router.media.reader import Digest, Glance, Reader
from router.media.resolve import PublicResolver
from router.media.sizes import Sizes
from router.media.source import MediaSource
from router.media.store import Store
from router.media.ticket import Blob, Clip, Ticket

__all__ = ["Blob", "Clip", "Glance", "MediaIntake", "MediaSource", "Ticket"]


class MediaIntake:
    """Everything between a media reference and pixels, for the whole process.

    Made without a running loop; sockets, threads and processes come into being
    when they are first needed. `on_sniff` hears how many seconds an image's
    header took.
    """

    def __init__(
        self,
        limits: MediaLimits | None = None,
        *,
        resolver: PublicResolver | None = None,
        on_sniff: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.limits = limits = limits or MediaLimits()
        fetch = limits.fetch
        self.budget = Budget(
            Amount(limits.budget_bytes, limits.budget_pixels),
            wait=limits.budget_wait,
            retry_after=limits.budget_retry_after,
        )
        self._on_sniff = on_sniff
        self.store: Store[Any] = Store(limits.cache_bytes)
        self.contents = ContentCache(self.store)
        self._pool = PixelPool(limits.worker_threads)
        self._fetcher = Fetcher(
            fetch,
            resolver
            or PublicResolver(
                allow_private=fetch.allow_private_hosts,
                timeout=fetch.connect_timeout,
                threads=fetch.resolver_threads,
            ),
        )
        self.downloads = UrlCache(self.store, self._fetcher, self.budget)
        self.sizes = Sizes(self._fetcher)
        self.decoder = Decoder(limits, self._pool)
        self._reader = Reader(
            limits, self.budget, self._pool, self._fetcher, self.downloads, self.sizes
        )

    async def warm_up(self) -> None:
        """Makes now what is otherwise made with the first item: session, decoder process."""
        await self._fetcher.warm_up()
        await self.decoder.warm_up()

    async def close(self) -> None:
        """Ends downloads, decoder processes and threads, in this order."""
        await self.downloads.close()
        await self.sizes.close()
        await self.contents.close()
        await self._fetcher.close()
        await self.decoder.close()
        await self._pool.close()

    async def judge(
        self,
        source: MediaSource,
        index: int,
        *,
        measure: bool = False,
        digest: Digest | None = None,
    ) -> Glance:
        """Everything a reference must pass before it is forwarded to a worker; fetches nothing.

        The shape of the URL, its scheme, the allowed domains, every address of its
        host; for data: the length, the base64 and the kind and size of what it
        holds, for file: the root. With `measure` the first bytes of a remote image
        are asked for, to learn its size; that this fails is no fault. With
        `digest` the result has a name for what is referred to. Raises Fault
        MEDIA_FORMAT_UNSUPPORTED, MEDIA_URL_INVALID,
        MEDIA_SCHEME_UNSUPPORTED, MEDIA_HOST_FORBIDDEN, MEDIA_REF_TOO_LARGE,
        MEDIA_TOO_LARGE, MEDIA_DECODE_FAILED, FILE_FORBIDDEN, MEDIA_NOT_FOUND,
        MEDIA_FETCH_FAILED, MEDIA_FETCH_TIMEOUT, MEDIA_BUDGET_FULL.
        """
        return await self._reader.judge(source, index, measure=measure, digest=digest)

    def background_of(self, encoded: Blob | Clip) -> str:
        """Names what a file is blended on, where that is not the workers' own white.

        Pixels depend on it, so identities have to.
        """
        background = self.limits.background
        if isinstance(encoded, Clip) or not encoded.header.has_alpha or background == WHITE:
            return ""
        return f"background={bytes(background).hex()}"

    def ticket(self) -> Ticket:
        """The budget scope of one request, for a `with` statement."""
        return Ticket(
            self.limits, self.budget, self._pool, self._reader, self.decoder, self._on_sniff
        )
