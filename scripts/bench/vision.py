"""JPEG bytes to Qwen3-VL tensors: time on one thread, on two, and peak memory.

    python scripts/bench/vision.py [--rounds 7] [--images tests/data/images]

Where torch, torchvision and transformers can be imported, their processor runs
on the same bytes in the same process, the two taking turns, and every result is
compared bit for bit. Elsewhere only the router's own path is timed. All of it is
in the environment that `scripts/real/reference.sh` leaves, in $HOME/.cache/mmrouter-real-vllm:

    PYTHONPATH=$PWD:$E/runner OMP_NUM_THREADS=1 $E/venv/bin/python scripts/bench/vision.py
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np
from PIL import Image

from router.buffers import SHARED
from router.media.decode import decode_in_process
from router.media.sniff import sniff
from router.vision.backend.cpu import CpuBackend
from router.vision.files import ModelFiles
from router.vision.plan import DType, PixelFormat
from router.vision.registry import spec_for

SETTINGS: dict[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
CASES = (
    ("640x480", "photo_640x480.jpg", None),
    ("1920x1080", "photo_1920x1080.jpg", None),
    ("4032x3024", "photo_4032x3024.jpg", None),
    ("4032x3024 at 1.31 MP", "photo_4032x3024.jpg", 1310720),
)
FORMATS: tuple[DType, ...] = ("uint8", "float32")

Run = Callable[[bytes], Any]


def settings_for(max_pixels: int | None) -> dict[str, Any]:
    if max_pixels is None:
        return SETTINGS
    return {**SETTINGS, "size": {"longest_edge": max_pixels, "shortest_edge": 65536}}


def ours(backend: CpuBackend, max_pixels: int | None, dtype: DType) -> Run:
    files = ModelFiles(
        preprocessor_config=settings_for(max_pixels), token_ids={"<|image_pad|>": 151655}
    )
    spec = spec_for("qwen3_vl", (), files)
    assert spec is not None
    pixel_format = PixelFormat(dtype, normalized=dtype != "uint8")

    def run(data: bytes) -> Any:
        header = sniff(data, max_pixels=1 << 30, index=0)
        pixels = decode_in_process(data, header, 0, empty=SHARED.empty)
        plan = spec.plan_image(pixels.shape[1], pixels.shape[0], index=0)
        return spec.pack(plan, pixels, pixel_format, backend)

    return run


def reference(max_pixels: int | None, dtype: DType) -> Run | None:
    """Hugging Face's torchvision processor, None where it is not installed."""
    try:
        import torch
        from transformers import Qwen2VLImageProcessor
    except ImportError:
        return None
    torch.set_num_threads(1)
    processor = Qwen2VLImageProcessor(**settings_for(max_pixels))
    raw = {"do_rescale": False, "do_normalize": False} if dtype == "uint8" else {}

    def run(data: bytes) -> Any:
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        return processor(images=picture, return_tensors="pt", **raw)["pixel_values"].numpy()

    return run


def in_turns(data: bytes, runs: list[Run], rounds: int) -> list[float]:
    """Median milliseconds of processor time of each run, the runs taking turns.

    Processor time of the one thread: a busy machine blurs it least.
    """
    for run in runs:
        run(data)
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, spent in zip(runs, times, strict=True):
            begun = time.thread_time()
            run(data)
            spent.append((time.thread_time() - begun) * 1e3)
    return [median(spent) for spent in times]


def a_second(data: bytes, run: Run, threads: int, seconds: float) -> float:
    """Pictures a second on `threads` threads."""

    def loop(until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            run(data)
            done += 1
        return done

    with ThreadPoolExecutor(threads) as pool:
        begun = time.perf_counter()
        counts = list(pool.map(loop, [begun + seconds] * threads))
        return sum(counts) / (time.perf_counter() - begun)


def peak(path: Path) -> None:
    """Print how far memory grows for one 12 MP picture, beside what it must hold."""
    backend = CpuBackend()
    backend.warm_up()
    run = ours(backend, None, "uint8")
    run((path / "photo_640x480.jpg").read_bytes())
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    out = run((path / "photo_4032x3024.jpg").read_bytes())
    grown = resident("VmHWM") - before
    print(json.dumps({"grown": grown, "needed": 4032 * 3024 * 3 + out.nbytes}))


def resident(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} in /proc/self/status")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each throughput figure")
    parser.add_argument("--images", type=Path, default=Path("tests/data/images"))
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        peak(options.images)
        return
    cv2.setNumThreads(1)
    backend = CpuBackend()
    backend.warm_up()
    if reference(None, "uint8") is None:
        print("torch, torchvision or transformers is missing: timing the router's path alone")
    print(f"{'milliseconds, one thread':<24}{'dtype':>8}{'router':>9}{'reference':>11}{'times':>7}")
    for name, file, max_pixels in CASES:
        data = (options.images / file).read_bytes()
        for dtype in FORMATS:
            mine, theirs = ours(backend, max_pixels, dtype), reference(max_pixels, dtype)
            if theirs is None:
                (spent,) = in_turns(data, [mine], options.rounds)
                print(f"{name:<24}{dtype:>8}{spent:>9.2f}")
                continue
            if not np.array_equal(mine(data), theirs(data)):
                sys.exit(f"{name} {dtype}: the tensors differ")
            spent, other = in_turns(data, [mine, theirs], options.rounds)
            print(f"{name:<24}{dtype:>8}{spent:>9.2f}{other:>11.2f}{other / spent:>7.2f}")
    print("\npictures a second, uint8")
    for name, file, max_pixels in CASES:
        data = (options.images / file).read_bytes()
        run = ours(backend, max_pixels, "uint8")
        one, two = (a_second(data, run, threads, options.seconds) for threads in (1, 2))
        print(f"{name:<24}one thread {one:8.1f}   two {two:8.1f}   times {two / one:.2f}")
    command = [sys.executable, __file__, "--peak", "--images", str(options.images)]
    memory = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    ratio = memory["grown"] / memory["needed"]
    print(
        f"\npeak memory for 12 MP: {memory['grown'] / 1e6:.0f} MB, "
        f"{ratio:.2f} times the decoded picture and its tensor"
    )


if __name__ == "__main__":
    main()
