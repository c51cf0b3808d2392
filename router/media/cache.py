"""What is worth keeping: downloads by URL, and anything at all by content.

Both doors share one store and so one cap. A URL answers from the store only
as far as HTTP allows it (RFC 9111): while fresh, or after the host confirmed
with 304 that nothing changed. The second door knows nothing of its values; the
caller's key must cover everything that makes them what they are.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from router.faults import Fault
from router.media.budget import Amount, Budget, Reservation
from router.media.download import Validators
from router.media.fetch import Fetcher, Response
from router.media.flight import SingleFlight
from router.media.signed import object_name
from router.media.store import Counters, Store
from router.media.url import MediaUrl

T = TypeVar("T")

# Shorter entity tags may be version numbers, which two objects can share.
_SHORTEST_DIGEST = 18
# Bytes that an entry takes beside its texts and data: a store full of empty files is full too.
_ENTRY = 512


@dataclass(frozen=True, slots=True)
class Held:
    """Downloaded bytes and the reservation that accounts for them."""

    data: bytes
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class _Kept:
    data: bytes
    dialled: str
    validators: Validators
    fresh_until: float

    @property
    def nbytes(self) -> int:
        """What it takes in memory, with its key."""
        texts = (self.dialled, self.dialled, self.validators.etag, self.validators.last_modified)
        return _ENTRY + sum(len(text) for text in texts if text) + len(self.data)


class UrlCache:
    """Downloads, each made once at a time and reused as far as HTTP allows."""

    def __init__(
        self,
        store: Store[Any],
        fetcher: Fetcher,
        budget: Budget,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._fetcher = fetcher
        self._budget = budget
        self._clock = clock
        self._flights: SingleFlight[Held] = SingleFlight(
            lambda download: download.reservation.release()
        )
        self.counters = Counters()

    async def get(self, url: MediaUrl, *, index: int, max_bytes: int, timeout: float) -> Held:
        """The bytes behind a URL; the caller releases the reservation.

        Raises Fault as `Fetcher.fetch`, naming this caller's item even when
        another one's download failed.
        """
        self._fetcher.judge(url, index)
        kept = self._kept(url, max_bytes)
        if kept is not None and kept.dialled == url.dialled and self._clock() < kept.fresh_until:
            self.counters.hits += 1
            # Shared as a download is: who asks twice at once has the bytes once.
            flight = self._flights.join(
                (url.dialled, max_bytes), partial(self._reserved, kept.data, index)
            )
        else:
            self.counters.misses += 1
            flight = self._flights.join(
                (url.dialled, max_bytes, timeout),
                partial(self._download, url, kept, index, max_bytes, timeout),
            )
        try:
            async with flight as held:
                return Held(held.data, held.reservation.hold())
        except Fault as fault:
            raise fault.for_item(index) from None

    async def close(self) -> None:
        """Ends running downloads."""
        await self._flights.close()

    async def _download(
        self, url: MediaUrl, kept: _Kept | None, index: int, max_bytes: int, timeout: float
    ) -> Held:
        reservation = self._budget.open()
        try:
            response = await self._fetcher.fetch(
                url,
                index=index,
                max_bytes=max_bytes,
                timeout=timeout,
                reservation=reservation,
                validators=_usable(kept, url) if kept is not None else None,
            )
            if response.data is not None:
                data = response.data
            else:
                assert kept is not None
                data = kept.data
                self.counters.revalidated += 1
                await reservation.grow(Amount(nbytes=len(data)), index=index)
            self._keep(url, data, response, kept)
        except BaseException:
            reservation.release()
            raise
        return Held(data, reservation)

    async def _reserved(self, data: bytes, index: int) -> Held:
        reservation = self._budget.open()
        try:
            await reservation.grow(Amount(nbytes=len(data)), index=index)
        except BaseException:
            reservation.release()
            raise
        return Held(data, reservation)

    def _kept(self, url: MediaUrl, max_bytes: int) -> _Kept | None:
        kept = cast("_Kept | None", self._store.get(_key(url)))
        return kept if kept is None or len(kept.data) <= max_bytes else None

    def _keep(self, url: MediaUrl, data: bytes, response: Response, kept: _Kept | None) -> None:
        freshness = _freshness(response.cache_control, response.age)
        validators = response.validators
        if response.data is None and kept is not None and not validators.etag:
            validators = kept.validators
        if response.redirected:
            # The next redirect may lead elsewhere: ask every time, and believe
            # only in a digest.
            freshness, validators = min(freshness, 0.0), _digest_only(validators)
        usable = freshness > 0 or validators.etag or validators.last_modified
        if freshness < 0 or response.single or not usable:
            self._store.discard(_key(url))
            return
        entry = _Kept(data, url.dialled, validators, self._clock() + freshness)
        self._store.put(_key(url), entry, entry.nbytes)


class ContentCache:
    """Values by content key, each made once at a time."""

    def __init__(self, store: Store[Any]) -> None:
        self._store = store
        self._flights: SingleFlight[Any] = SingleFlight()
        self.counters = Counters()

    async def get(
        self, key: Hashable, make: Callable[[], Awaitable[T]], size: Callable[[T], int]
    ) -> T:
        """The value of `key`, made by `make` where it is not kept.

        `make` outlives the caller that started it as long as anybody waits, so it
        must not lean on that caller's ticket but open its own. `size` is in bytes.
        """
        kept = self._store.get(("content", key))
        if kept is not None:
            self.counters.hits += 1
            return cast("T", kept)
        self.counters.misses += 1

        async def run() -> T:
            value = await make()
            self._store.put(("content", key), value, size(value))
            return value

        async with self._flights.join(key, run) as value:
            return cast("T", value)

    async def close(self) -> None:
        """Ends what is being made."""
        await self._flights.close()


def _key(url: MediaUrl) -> Hashable:
    return ("url", object_name(url))


def _usable(kept: _Kept, url: MediaUrl) -> Validators:
    """The validators that a request for `url` may carry.

    For the very URL the bytes came from: all. For the same object under another
    signature: only a strong entity tag long enough to be a digest, so that a 304
    proves both the right to the object and that it is the same.
    """
    return kept.validators if kept.dialled == url.dialled else _digest_only(kept.validators)


def _digest_only(validators: Validators) -> Validators:
    etag = validators.etag
    if etag is None or etag.startswith("W/") or len(etag) < _SHORTEST_DIGEST:
        return Validators()
    return Validators(etag=etag)


def _freshness(cache_control: str, age: int) -> float:
    """Seconds a response may be reused unasked; negative where it may not be kept at all."""
    directives = {}
    for part in cache_control.lower().split(","):
        name, _, value = part.strip().partition("=")
        directives[name] = value.strip('"')
    if "no-store" in directives or "private" in directives:
        return -1.0
    if "no-cache" in directives:
        return 0.0
    lifetime = directives.get("s-maxage", directives.get("max-age", ""))
    if not (lifetime.isascii() and lifetime.isdigit()):
        return 0.0
    return max(0.0, float(lifetime[:9]) - age)
