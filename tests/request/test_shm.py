"""Segments of shared memory: written whole, removed on every way out, swept after a crash."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from router.fleet.worker import Worker
from router.request import shm
from router.request.prepared import Body
from router.request.shm import SharedMemory
from router.vision.tensors import Batch
from router.wire import engine
from tests.serving import eventually


def batch(seed: int, rows: int = 64) -> Batch:
    pixels = np.random.default_rng(seed).integers(0, 256, (rows, 1536), np.uint8)
    head = engine.MultimodalInputs(mm_hashes=[f"hash {seed}"])
    head.pixel_values.dtype = "uint8"
    head.pixel_values.shape.extend(pixels.shape)
    return Batch(head, (pixels[: rows // 2], pixels[rows // 2 :]))


def worker(namespace: str) -> Worker:
    return cast(Worker, SimpleNamespace(capability=SimpleNamespace(shm_namespace=namespace)))


@pytest.fixture
def memory(tmp_path: Path) -> Any:
    shared = SharedMemory(1024, tmp_path)
    yield shared
    shared.close()


def files(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if not path.name.endswith(".lock")]


async def test_a_worker_finds_every_batch_where_its_handle_says(
    memory: SharedMemory, tmp_path: Path
) -> None:
    batches = [batch(1), batch(2, rows=10)]
    segment = await memory.share(batches, worker(memory.namespace))
    assert segment is not None
    body = Body(engine.GenerateRequest(text="x"), batches)
    request = engine.GenerateRequest.FromString(body.wire("id-1", segment.handles))
    assert (request.request_id, request.text) == ("id-1", "x")
    for sent, inputs in zip(batches, [request.mm_inputs, *request.extra_mm_inputs], strict=True):
        handle = inputs.pixel_values.shm
        content = (tmp_path / handle.name).read_bytes()[handle.offset :][: handle.nbytes]
        assert content == b"".join(part.tobytes() for part in sent.payload)
        assert list(inputs.pixel_values.shape) == list(sent.head.pixel_values.shape)
        assert inputs.mm_hashes == sent.head.mm_hashes
    # A worker removes the file when it has read one of them.
    assert len({handle.name for handle in segment.handles}) == len(batches)
    segment.unlink()
    segment.unlink()
    assert files(tmp_path) == []


@pytest.mark.parametrize("namespace", ["", "another-host:1"])
async def test_a_worker_that_does_not_share_the_memory_gets_no_segment(
    memory: SharedMemory, tmp_path: Path, namespace: str
) -> None:
    assert await memory.share([batch(1)], worker(namespace)) is None
    assert files(tmp_path) == []


async def test_small_tensors_and_short_space_go_inline(
    memory: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = worker(memory.namespace)
    memory.min_bytes = 10**9
    assert await memory.share([batch(1)], there) is None
    memory.min_bytes = 1
    monkeypatch.setattr(memory, "_free", lambda: 100_000)
    assert await memory.share([batch(1)], there) is None
    assert files(tmp_path) == []


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EMFILE, errno.EDQUOT, errno.EROFS])
async def test_what_cannot_be_written_goes_inline_and_leaves_nothing(
    memory: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(shm, "_write_all", full)
    assert await memory.share([batch(1)], worker(memory.namespace)) is None
    assert files(tmp_path) == []


async def test_memory_that_is_no_longer_there_is_not_used(tmp_path: Path) -> None:
    root = tmp_path / "mounted"
    root.mkdir()
    memory = SharedMemory(1, root)
    there = worker(memory.namespace)
    memory.close()
    root.rmdir()
    assert await memory.share([batch(1)], there) is None


async def test_a_segment_that_cannot_be_removed_fails_nobody(
    tmp_path: Path, logged: io.StringIO
) -> None:
    memory = SharedMemory(1024, tmp_path)
    segment = await memory.share([batch(1), batch(2)], worker(memory.namespace))
    assert segment is not None
    first = sorted(files(tmp_path))[0]
    # What a worker on this host may do, and a router that starts later has to live with.
    (tmp_path / first).unlink()
    (tmp_path / first).mkdir()
    segment.unlink()
    assert files(tmp_path) == [first]
    memory.close()
    (tmp_path / f"{first.rpartition('-')[0]}.lock").touch()
    SharedMemory(1024, tmp_path).close()
    assert files(tmp_path) == [first]
    assert {json.loads(line)["event"] for line in logged.getvalue().splitlines()} == {
        "shm_failed",
        "shm_swept",
    }


def test_no_lock_is_seen_that_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    flock = fcntl.flock

    def looking(descriptor: int, operation: int) -> None:
        seen.extend(path.name for path in tmp_path.glob("*.lock"))
        flock(descriptor, operation)

    monkeypatch.setattr("router.request.shm.fcntl.flock", looking)
    memory = SharedMemory(1024, tmp_path)
    assert seen == []
    assert len(list(tmp_path.iterdir())) == 1
    memory.close()
    assert not list(tmp_path.iterdir())


async def test_leaving_while_it_is_written_leaves_nothing(
    memory: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    begun, go_on = threading.Event(), threading.Event()
    write = shm._write

    def slowly(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(10)
        write(*arguments)

    monkeypatch.setattr(shm, "_write", slowly)
    sharing = asyncio.create_task(memory.share([batch(1)], worker(memory.namespace)))
    assert await asyncio.to_thread(begun.wait, 10)
    sharing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sharing
    go_on.set()
    await eventually(lambda: not files(tmp_path), "the segment is gone")


def test_what_a_killed_router_left_is_swept_and_what_a_living_one_has_stays(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, os, pathlib; from router.request.shm import SharedMemory\n"
        f"root = pathlib.Path({str(tmp_path)!r}); memory = SharedMemory(1, root)\n"
        "(root / f'mmrouter-{memory._owner}-1').write_bytes(b'left')\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert len(files(tmp_path)) == 1
    living = SharedMemory(1, tmp_path)
    (tmp_path / f"mmrouter-{living._owner}-1").write_bytes(b"in use")
    another = SharedMemory(1, tmp_path)
    assert files(tmp_path) == [f"mmrouter-{living._owner}-1"]
    another.close()
    living.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", [0, 2])
def test_a_sweep_is_told_of_where_there_was_something_to_sweep(
    tmp_path: Path, logged: io.StringIO, left: int
) -> None:
    (tmp_path / "mmrouter-dead.lock").touch()
    for number in range(left):
        (tmp_path / f"mmrouter-dead-{number}").touch()
    SharedMemory(1, tmp_path).close()
    assert list(tmp_path.iterdir()) == []
    told = [json.loads(line) for line in logged.getvalue().splitlines()]
    assert [line["segments"] for line in told] == [left] * bool(left)


def test_the_namespace_names_host_and_tmpfs(tmp_path: Path) -> None:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert shm.namespace_id(tmp_path) == f"{boot_id}:{os.stat(tmp_path).st_dev}"
    assert shm.namespace_id(tmp_path / "missing") == ""
