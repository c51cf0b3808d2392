"""Where decoding runs: threads of this process, or processes of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from router.buffers import SHARED
from router.media import video
from router.media.budget import Reservation
from router.media.decode import Pixels, decode_in_process, decode_in_sandbox
from router.media.header import ImageHeader
from router.media.limits import MediaLimits
from router.media.pool import PixelPool
from router.media.sandbox.process import Sandbox
from router.media.video_header import VideoHeader

T = TypeVar("T")


class Decoder:
    """Sends each job where it belongs.

    The sandbox has threads of its own, one a process, that only wait: a file
    that keeps its decoder busy to the time limit holds up no JPEG.
    """

    def __init__(self, limits: MediaLimits, pool: PixelPool) -> None:
        self._limits = limits
        self._pool = pool
        self._waiters = PixelPool(limits.sandbox_processes)
        self._sandbox = Sandbox(memory=limits.sandbox_memory)

    @property
    def sandbox_restarts(self) -> int:
        """How many decoder processes had to be killed."""
        return self._sandbox.restarts

    async def warm_up(self) -> None:
        """Starts a decoder process."""
        await self._waiters.run((), self._sandbox.start)

    async def image(
        self,
        held: Iterable[Reservation],
        data: bytes,
        header: ImageHeader,
        *,
        hard: bool,
        index: int,
    ) -> Pixels:
        """uint8 [height, width, 3]. Raises Fault MEDIA_DECODE_FAILED."""
        if not hard:
            return await self._pool.run(held, self._in_process(data, header, index))
        return await self._waiters.run(
            held,
            self._sandbox.run,
            decode_in_sandbox,
            data,
            header,
            index,
            background=self._limits.background,
            timeout=self._limits.decode_timeout,
        )

    async def within(
        self,
        held: Iterable[Reservation],
        work: Callable[[Callable[[], Pixels]], T],
        data: bytes,
        header: ImageHeader,
        *,
        index: int,
    ) -> T:
        """What `work` makes of an image that is not hard, in one thread with its decoding.

        `work` is given what decodes it, and raises as that does.
        """
        return await self._pool.run(held, work, self._in_process(data, header, index))

    def _in_process(self, data: bytes, header: ImageHeader, index: int) -> Callable[[], Pixels]:
        return partial(
            decode_in_process,
            data,
            header,
            index,
            background=self._limits.background,
            empty=SHARED.empty,
        )

    async def clip(self, held: Iterable[Reservation], data: bytes, *, index: int) -> VideoHeader:
        """The header of a clip. Raises Fault MEDIA_DECODE_FAILED, MEDIA_TOO_LARGE."""
        return await self._waiters.run(
            held, self._sandbox.run, video.open_clip, data, self._limits.video, index=index
        )

    async def frames(
        self,
        held: Iterable[Reservation],
        data: bytes,
        header: VideoHeader,
        indices: Sequence[int],
        *,
        index: int,
    ) -> Pixels:
        """uint8 [n, height, width, 3]. Raises Fault MEDIA_DECODE_FAILED."""
        return await self._waiters.run(
            held,
            self._sandbox.run,
            video.read_frames,
            data,
            header,
            indices,
            self._limits.video,
            index=index,
        )

    async def close(self) -> None:
        """Ends the decoder processes; work in them fails."""
        self._waiters.drop()
        self._sandbox.interrupt()
        await self._waiters.close()
        await asyncio.to_thread(self._sandbox.stop)
