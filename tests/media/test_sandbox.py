"""A decoder may abort, run away or lie; the picture is lost and nothing else."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from PIL import Image

from router.faults import Fault, Reason
from router.media.intake import MediaIntake, MediaSource
from router.media.limits import MediaLimits
from router.media.sandbox.process import DecoderProcess, SandboxFailed
from router.media.sandbox.protocol import Job, Kind
from tests.media.images import GOLDENS, read, sha256

MEMORY = 2 * 1024**3


@pytest.fixture
def hostile() -> Iterator[DecoderProcess]:
    process = DecoderProcess(memory=MEMORY, module="tests.media.hostile_child")
    yield process
    process.stop()


def call(process: DecoderProcess, data: bytes, *, timeout: float = 30.0) -> bytes:
    job = Job(Kind.IMAGE, len(data))
    return process.call(job, data, timeout=timeout, shape=(len(data),))[1].tobytes()


@pytest.mark.parametrize("order", [b"abort", b"lie", b"stop"])
def test_a_decoder_that_dies_or_lies_costs_one_picture(
    hostile: DecoderProcess, order: bytes
) -> None:
    assert call(hostile, b"picture") == b"picture"
    with pytest.raises(SandboxFailed):
        call(hostile, order)
    assert hostile.restarts == 1
    assert call(hostile, b"another") == b"another"


def test_a_decoder_that_runs_away_is_stopped_at_the_time_limit(hostile: DecoderProcess) -> None:
    hostile.start()
    with pytest.raises(SandboxFailed):
        call(hostile, b"hang", timeout=0.1)
    assert call(hostile, b"another") == b"another"


@pytest.mark.parametrize(
    "order",
    [b"eat", b"open", b"dial", b"lift", b"fork", b"run!", b"kill", b"wipe", b"link", b"lame"],
)
def test_memory_files_sockets_and_processes_are_out_of_reach(
    hostile: DecoderProcess, order: bytes
) -> None:
    with pytest.raises(SandboxFailed):
        call(hostile, order)
    assert hostile.restarts == 0


def test_a_job_may_come_in_pieces(hostile: DecoderProcess) -> None:
    pieces = (b"one", b"", b"two")
    _, pixels = hostile.call(Job(Kind.IMAGE, 6), *pieces, timeout=30.0, shape=(6,))
    assert pixels.tobytes() == b"onetwo"


def test_the_parents_secrets_are_not_in_the_childs_environment(
    hostile: DecoderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    assert call(hostile, b"secrets?") == b"none    "


def test_a_child_that_does_not_start_is_our_fault_and_not_the_datas() -> None:
    process = DecoderProcess(memory=MEMORY, module="tests.media.no_such_module")
    with pytest.raises(RuntimeError):
        call(process, b"picture")


@pytest.fixture
async def intake() -> AsyncIterator[MediaIntake]:
    # Many times what an honest file takes, and a small part of what a hostile one does.
    intake = MediaIntake(MediaLimits(worker_threads=1, decode_timeout=3))
    await intake.warm_up()
    yield intake
    await intake.close()


def endless_scans() -> bytes:
    """A progressive JPEG whose last refinement is repeated until the decoder is worn out.

    Each has a few bytes and goes through four megapixels, which takes some milliseconds.
    """
    file = io.BytesIO()
    Image.new("RGB", (2000, 2000), (10, 200, 30)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 50_000 + data[-2:]


async def test_a_jpeg_that_would_take_minutes_is_stopped_and_the_next_file_is_read(
    intake: MediaIntake,
) -> None:
    with intake.ticket() as ticket:
        blob = await ticket.load(MediaSource("image", data=endless_scans()), 0)
        with pytest.raises(Fault) as caught:
            await ticket.decode(blob)
    assert caught.value.reason is Reason.MEDIA_DECODE_FAILED
    assert intake.decoder.sandbox_restarts == 1
    with intake.ticket() as ticket:
        name = "photo_203x151.avif"
        blob = await ticket.load(MediaSource("image", data=read(name)), 0)
        assert blob.hard
        assert sha256(await ticket.decode(blob)) == GOLDENS[name]["sha256"]


async def test_damaged_data_does_not_cost_a_process(intake: MediaIntake) -> None:
    with intake.ticket() as ticket:
        data = read("photo_203x151.avif")[:2000]
        blob = await ticket.load(MediaSource("image", data=data), 2)
        with pytest.raises(Fault) as caught:
            await ticket.decode(blob)
    assert caught.value.reason is Reason.MEDIA_DECODE_FAILED
    assert caught.value.metadata["index"] == "2"
    assert intake.decoder.sandbox_restarts == 0


async def test_closing_does_not_wait_for_a_decoder_that_runs_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = threading.Event()
    call = DecoderProcess.call

    def noted(process: DecoderProcess, *job: Any, **how: Any) -> Any:
        begun.set()
        return call(process, *job, **how)

    monkeypatch.setattr(DecoderProcess, "call", noted)
    intake = MediaIntake(MediaLimits(worker_threads=1, decode_timeout=3600.0))
    await intake.warm_up()
    with intake.ticket() as ticket:
        blob = await ticket.load(MediaSource("image", data=endless_scans()), 0)
        running = asyncio.create_task(ticket.decode(blob))
        queued = asyncio.create_task(ticket.decode(blob))
        await asyncio.to_thread(begun.wait, 30)
        await intake.close()
        first, second = await asyncio.gather(running, queued, return_exceptions=True)
    assert isinstance(first, Fault)
    assert first.reason is Reason.MEDIA_DECODE_FAILED
    assert isinstance(second, asyncio.CancelledError)
