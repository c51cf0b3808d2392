"""The CUDA backend: the same integers on a device, and the CPU where it fails.

OpenCV decodes, a picture goes up once for each draw through pinned memory, and
the written span of the output comes down. Streams and device buffers are pooled
and bounded, so that concurrent requests neither wait for one another more than
they must nor fill the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numba.cuda
import numpy as np
import numpy.typing as npt

from router.observe.logging import get_logger
from router.vision.backend import kernels
from router.vision.backend.cpu import CpuBackend
from router.vision.geometry import Draw, Tiles, whole
from router.vision.resample import Taps, taps, vertical_first
from router.vision.values import Table

# numba's stubs lack what its CUDA target and its simulator both have.
cuda: Any = numba.cuda

_log = get_logger("vision")
_BLOCK = (32, 8)
# Below this a CPU is done before a device has the picture.
_SMALLEST_WORTH_IT = 1_000_000
# Seconds for which a device that failed is left alone, twice as long after each further
# failure: its memory may be another process's for a while, or it is gone.
_FIRST_REST, _LONGEST_REST = 10.0, 600.0
_LONGEST_WHY = 200


def device_present() -> bool:
    """Whether a CUDA device (or the simulator) can be used."""
    try:
        return bool(cuda.is_available())
    except Exception:  # a broken driver raises whatever it likes
        return False


@dataclass
class _Lane:
    """A stream with the buffers that its draws use again and again."""

    stream: Any
    device: dict[str, Any] = field(default_factory=dict)
    pinned: Any = None

    def bytes_on_device(self, name: str, size: int) -> Any:
        """A flat uint8 device array of `size` bytes; grows, never shrinks."""
        held = self.device.get(name)
        if held is None or held.size < size:
            self.device[name] = held = None
            self.device[name] = held = cuda.device_array(size, np.uint8)
        return held[:size]

    def staged(self, size: int) -> npt.NDArray[np.uint8]:
        """Pinned host memory, so that copies need not stop the stream."""
        if self.pinned is None or self.pinned.size < size:
            self.pinned = None
            self.pinned = cuda.pinned_array(size, np.uint8)
        pinned: npt.NDArray[np.uint8] = self.pinned[:size]
        return pinned


class CudaBackend:
    """Draws on a device; anything that fails there is drawn again by the CPU.

    A device that failed rests, for seconds to minutes, before it is tried again.
    `smallest` is the number of source pixels from which the device is used.
    `on_failure` is called once for each draw that had to fall back.
    """

    name = "cuda"

    def __init__(
        self,
        cpu: CpuBackend,
        *,
        lanes: int = 2,
        smallest: int = _SMALLEST_WORTH_IT,
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpu = cpu
        self._clock = clock
        self._smallest = smallest
        self._on_failure = on_failure
        self._free: list[_Lane] = []
        self._turn = threading.Semaphore(lanes)
        self._lock = threading.Lock()
        self._rest = 0.0
        self._rests_until = float("-inf")

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        return self._cpu.empty(shape, dtype)

    def warm_up(self) -> None:
        """Warm the CPU's loops, then compile the kernels by drawing one picture."""
        self._cpu.warm_up()
        picture = np.zeros((8, 8, 3), np.uint8)
        for bits in ("u1", "u2", "u4"):
            table = Table(np.zeros((3, 256), np.dtype(bits)), identity=bits == "u1")
            draw = Draw(whole(8, 8), 4, 4, whole(4, 4), "bilinear", "torch", Tiles(1, 1, 4, 4))
            self._attempt(picture, draw, table, np.zeros(48, np.dtype(bits)))

    def draw(
        self, pixels: npt.NDArray[np.uint8], draw: Draw, table: Table, out: npt.NDArray[Any]
    ) -> None:
        worth_it = draw.crop.width * draw.crop.height >= self._smallest
        resting = self._clock() < self._rests_until
        if resting or not worth_it or not self._attempt(pixels, draw, table, out):
            self._cpu.draw(pixels, draw, table, out)

    def _attempt(
        self, pixels: npt.NDArray[np.uint8], draw: Draw, table: Table, out: npt.NDArray[Any]
    ) -> bool:
        """Whether the device drew it. A draw writes all its values or is done over."""
        try:
            with self._lane() as lane:
                _draw(lane, pixels, draw, table, out)
        except Exception as error:  # drivers raise their own types, and some raise none of them
            self._on_failure()
            self._leave_alone(f"{type(error).__name__}: {error}"[:_LONGEST_WHY])
            return False
        if self._rest:
            self._well_again()
        return True

    def _leave_alone(self, why: str) -> None:
        with self._lock:
            if self._clock() < self._rests_until:
                return  # a draw of the same moment has said so
            self._rest = min(self._rest * 2 or _FIRST_REST, _LONGEST_REST)
            self._rests_until = self._clock() + self._rest
            # Their memory may be what it lacks.
            self._free.clear()
        _log.error("cuda_failed", why=why, again_in=self._rest)

    def _well_again(self) -> None:
        with self._lock:
            if not self._rest or self._clock() < self._rests_until:
                return  # a draw that began before the failure
            self._rest = 0.0
        _log.info("cuda_again")

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        """One of the lanes, alone; one whose draw failed is not used again."""
        with self._turn:
            with self._lock:
                lane = self._free.pop() if self._free else None
            lane = lane or _Lane(cuda.stream())
            yield lane
            with self._lock:
                self._free.append(lane)


def _draw(
    lane: _Lane,
    pixels: npt.NDArray[np.uint8],
    draw: Draw,
    table: Table,
    out: npt.NDArray[Any],
) -> None:
    crop, window, stream = draw.crop, draw.window, lane.stream
    source = _upload(lane, "source", _crop(pixels, draw)).reshape(crop.height, crop.width, 3)
    wide = taps(crop.width, draw.width, draw.filter, draw.rule).window(window.left, window.width)
    high = taps(crop.height, draw.height, draw.filter, draw.rule).window(window.top, window.height)
    keeps_width, keeps_height = crop.width == draw.width, crop.height == draw.height
    # Where the window still has to be cut out of what the passes leave.
    left = window.left if keeps_width else 0
    top = window.top if keeps_height else 0
    passes = []
    if not keeps_width:
        passes.append(("across", kernels.across, wide))
    if not keeps_height:
        passes.append(("down", kernels.down, high))
    if len(passes) == 2 and vertical_first(
        draw.rule, crop.height, crop.width, draw.height, draw.width
    ):
        passes.reverse()
    for name, kernel, axis in passes:
        height, width = source.shape[:2]
        shape = (height, window.width, 3) if name == "across" else (window.height, width, 3)
        target = lane.bytes_on_device(name, int(np.prod(shape))).reshape(shape)
        kernel[_grid(shape[1], shape[0]), _BLOCK, stream](
            source, 0, *_upload_taps(lane, name, axis), target
        )
        source = target
    _place(lane, source, (top, left), draw, table, out)


def _place(
    lane: _Lane,
    source: Any,
    corner: tuple[int, int],
    draw: Draw,
    table: Table,
    out: npt.NDArray[Any],
) -> None:
    """Scatter on the device into the span of `out` that the layout covers, and fetch it."""
    address = draw.layout.addressing()
    bits = np.dtype(f"u{out.dtype.itemsize}")
    span = out[draw.start :][: _extent(draw)].view(bits)
    height, width = draw.window.height, draw.window.width
    rows = address.rows[draw.top : draw.top + height]
    columns = address.columns[draw.left : draw.left + width]
    if 3 * height * width * address.copies == span.size:
        on_device = lane.bytes_on_device("out", span.nbytes).view(bits)
    else:
        # What the draw leaves alone must survive: other frames and the background.
        on_device = _upload(lane, "out", span.view(np.uint8)).view(bits)
    kernels.scatter[_grid(width, height), _BLOCK, lane.stream](
        source,
        *corner,
        cuda.to_device(table.levels.view(bits), stream=lane.stream),
        cuda.to_device(rows, stream=lane.stream),
        cuda.to_device(columns, stream=lane.stream),
        address.channel_stride,
        address.copies,
        address.copy_stride,
        on_device,
    )
    staged = lane.staged(span.nbytes)
    on_device.view(np.uint8).copy_to_host(staged, stream=lane.stream)
    lane.stream.synchronize()
    span.view(np.uint8)[:] = staged


def _extent(draw: Draw) -> int:
    """One more than the largest offset from its start that the draw writes."""
    address = draw.layout.addressing()
    rows = address.rows[draw.top : draw.top + draw.window.height]
    columns = address.columns[draw.left : draw.left + draw.window.width]
    last = int(rows.max()) + int(columns.max()) + 2 * address.channel_stride
    return last + (address.copies - 1) * address.copy_stride + 1


def _crop(pixels: npt.NDArray[np.uint8], draw: Draw) -> npt.NDArray[np.uint8]:
    box = draw.crop
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def _upload(lane: _Lane, name: str, values: npt.NDArray[np.uint8]) -> Any:
    """`values` on the device, flat, through pinned memory."""
    staged = lane.staged(values.size)
    np.copyto(staged.reshape(values.shape), values)
    target = lane.bytes_on_device(name, values.size)
    target.copy_to_device(staged, stream=lane.stream)
    # The pinned memory is used again at once.
    lane.stream.synchronize()
    return target


def _upload_taps(lane: _Lane, name: str, axis: Taps) -> tuple[Any, Any, Any, int]:
    first, count, weights = (
        cuda.to_device(np.ascontiguousarray(part), stream=lane.stream)
        for part in (axis.first, axis.count, axis.weights)
    )
    return first, count, weights, axis.precision


def _grid(width: int, height: int) -> tuple[int, int]:
    return -(-width // _BLOCK[0]), -(-height // _BLOCK[1])
