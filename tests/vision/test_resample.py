"""Resizing alone, against torchvision and two Pillow versions."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import PIL
import pytest
from PIL import Image

from router.buffers import BufferPool
from router.vision.backend import loops
from router.vision.backend.cpu import CpuBackend
from router.vision.geometry import Box, Draw, Filter, Rule, Tiles, whole
from router.vision.plan import PixelFormat
from router.vision.resample import taps
from router.vision.values import Normalization, value_table
from tests.vision.pictures import golden, picture

BACKEND = CpuBackend()
LEVELS = value_table(Normalization((0, 0, 0), (1, 1, 1)), "uint8", normalized=False)
KEYS: dict[Rule, str] = {
    "torch": "torchvision_uint8",
    "pillow12": "pillow_12.3.0",
    "pillow13": "pillow_13.0.0",
}


def resized(
    pixels: np.ndarray,
    size: tuple[int, int],
    filter: Filter,
    rule: Rule,
    window: Box | None = None,
    crop: Box | None = None,
) -> np.ndarray:
    """uint8 [height, width, 3] at `size` (height, width), or its `window`."""
    window = window or whole(size[1], size[0])
    crop = crop or whole(pixels.shape[1], pixels.shape[0])
    out = np.zeros((3, window.height, window.width), np.uint8)
    layout = Tiles(1, 1, window.height, window.width)
    draw = Draw(crop, *size, window, filter, rule, layout)
    BACKEND.draw(pixels, draw, LEVELS, out.reshape(-1))
    return np.ascontiguousarray(out.transpose(1, 2, 0))


def test_weights_are_kept_but_for_those_that_take_megabytes() -> None:
    assert taps(4000, 1000, "bicubic", "torch") is taps(4000, 1000, "bicubic", "torch")
    for sizes in ((1 << 17, 10), (10, 1 << 17)):
        once, again = (taps(*sizes, "bicubic", "torch") for _ in range(2))
        assert once is not again
        assert np.array_equal(once.weights, again.weights)


@pytest.mark.parametrize("rule", list(KEYS))
@pytest.mark.parametrize(
    "case",
    golden("resample.json")["cases"],
    ids=lambda c: f"{c['image']}-{c['out_width']}x{c['out_height']}-{c['filter']}",
)
def test_resizing_equals_the_reference(case: dict[str, Any], rule: Rule) -> None:
    result = resized(
        picture(case["image"]), (case["out_height"], case["out_width"]), case["filter"], rule
    )
    assert hashlib.sha256(result.tobytes()).hexdigest() == case[KEYS[rule]]


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "lanczos"])
def test_random_sizes_equal_the_installed_pillow(filter: Filter) -> None:
    rule: Rule = "pillow13" if int(PIL.__version__.split(".")[0]) >= 13 else "pillow12"
    code = Image.Resampling[filter.upper()]
    noise = np.random.default_rng(11)
    for _ in range(40):
        height, width, new_height, new_width = (int(v) for v in noise.integers(1, 150, 4))
        pixels = noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
        theirs = np.asarray(Image.fromarray(pixels).resize((new_width, new_height), code))
        ours = resized(pixels, (new_height, new_width), filter, rule)
        assert np.array_equal(ours, theirs), (height, width, new_height, new_width)


@pytest.mark.parametrize("rule", list(KEYS))
def test_a_window_is_that_part_of_the_whole(rule: Rule) -> None:
    pixels = picture("photo_333x517_422.jpg")
    for size in ((200, 517), (517, 100), (100, 333), (60, 700), (517, 333)):
        full = resized(pixels, size, "bicubic", rule)
        window = Box(size[1] // 3, size[0] // 4, size[1] // 2, size[0] // 2)
        part = resized(pixels, size, "bicubic", rule, window)
        expected = full[
            window.top : window.top + window.height, window.left : window.left + window.width
        ]
        assert np.array_equal(part, expected), size


def test_a_crop_is_resized_as_a_picture_of_its_own() -> None:
    pixels = picture("photo_333x517_422.jpg")
    crop = Box(31, 77, 150, 200)
    alone = np.ascontiguousarray(pixels[77:277, 31:181])
    for size in ((90, 80), (200, 80), (90, 150), (200, 150)):
        ours = resized(pixels, size, "bilinear", "torch", crop=crop)
        assert np.array_equal(ours, resized(alone, size, "bilinear", "torch")), size


def test_read_only_and_strided_pictures_give_the_same() -> None:
    pixels = picture("photo_161x184_444.jpg")
    expected = resized(pixels, (100, 100), "bicubic", "torch")
    frozen = pixels.copy()
    frozen.setflags(write=False)
    assert np.array_equal(resized(frozen, (100, 100), "bicubic", "torch"), expected)
    mirrored = np.ascontiguousarray(pixels[:, ::-1])[:, ::-1]
    assert np.array_equal(resized(mirrored, (100, 100), "bicubic", "torch"), expected)


def test_after_warm_up_nothing_is_compiled_any_more() -> None:
    backend = CpuBackend()
    backend.warm_up()
    compiled = [len(f.signatures) for f in (loops.resize_lines, loops.resize_and_place)]
    for dtype in ("uint8", "bfloat16", "float32"):
        pixel_format = PixelFormat(dtype, normalized=False)  # type: ignore[arg-type]
        table = value_table(Normalization((0, 0, 0), (1, 1, 1)), dtype, normalized=False)
        for side in range(5, 33):
            layout = Tiles(1, 1, side, side)
            draw = Draw(whole(161, 184), side, side, whole(side, side), "bicubic", "torch", layout)
            out = np.empty(3 * side * side, pixel_format.numpy_dtype)
            backend.draw(picture("photo_161x184_444.jpg"), draw, table, out)
    assert [len(f.signatures) for f in (loops.resize_lines, loops.resize_and_place)] == compiled


def test_buffers_come_back_when_the_last_view_is_gone() -> None:
    backend = CpuBackend()
    first = backend.empty((1000, 1000), np.dtype(np.uint8))
    address = first.__array_interface__["data"][0]
    view = first[10:].view(np.uint16)
    del first
    other = backend.empty((1000, 1000), np.dtype(np.uint8))
    assert other.__array_interface__["data"][0] != address
    del view
    assert backend.empty((1000, 1000), np.dtype(np.uint8)).__array_interface__["data"][0] == address


def test_a_pool_keeps_no_more_than_its_limit() -> None:
    pool = BufferPool(1 << 20)
    arrays = [pool.empty((1 << 19,), np.dtype(np.uint8)) for _ in range(6)]
    del arrays
    assert 0 < pool.idle_bytes <= 1 << 20
