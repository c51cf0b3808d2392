"""References in, pixels out, and the budget whole again afterwards."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from router.faults import Fault, Reason
from router.media import reader
from router.media.budget import Amount
from router.media.header import ImageHeader
from router.media.intake import Glance, MediaIntake, MediaSource
from router.media.limits import FetchLimits, MediaLimits
from router.media.sniff import sniff
from tests.media.images import DATA, GOLDENS, read, sha256
from tests.media.server import Request, Server, fixed, raw, running

OPEN = FetchLimits(allow_private_hosts=True, retry_backoff=0.0)
LOCAL = MediaLimits(fetch=OPEN, worker_threads=2, local_root=DATA / "images")


def data_url(name: str, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(read(name)).decode()}"


def image(name: str) -> MediaSource:
    return MediaSource("image", data=read(name))


async def drained(intake: MediaIntake) -> None:
    """Waits until threads have let go; then nothing may be reserved."""
    async with asyncio.timeout(10):
        await intake.close()
        for _ in range(3):
            await asyncio.sleep(0)
    assert intake.budget.used == Amount()
    assert intake.budget.waiting == 0


@pytest.fixture
async def intake() -> AsyncIterator[MediaIntake]:
    intake = MediaIntake(LOCAL)
    yield intake
    await drained(intake)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running() as server:
        yield server


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "TIFF", "AVIF"])
async def test_transparent_pictures_lie_on_the_background_that_was_asked_for(kind: str) -> None:
    encoded = io.BytesIO()
    Image.new("RGBA", (8, 6), (200, 0, 0, 0)).save(encoded, kind)
    intake = MediaIntake(replace(LOCAL, background=(16, 32, 48)))
    with intake.ticket() as ticket:
        clear = await ticket.load(MediaSource("image", data=encoded.getvalue()), 0)
        pixels = await ticket.decode(clear)
        opaque = await ticket.load(image("tiny_20x30.png"), 1)
    assert (pixels == (16, 32, 48)).all()
    assert intake.background_of(clear) == "background=102030"
    assert intake.background_of(opaque) == ""
    assert MediaIntake(LOCAL).background_of(clear) == ""
    await drained(intake)


@pytest.mark.parametrize("name", ["photo_640x480.jpg", "tiny_20x30.png", "exif_6_24x16.jpg"])
async def test_a_data_url_becomes_the_reference_pixels(intake: MediaIntake, name: str) -> None:
    with intake.ticket() as ticket:
        blob = await ticket.load(MediaSource("image", url=data_url(name)), 0)
        assert intake.budget.used.nbytes == len(read(name))
        pixels = await ticket.decode(blob)
        assert intake.budget.used.pixels == blob.header.pixels
    assert sha256(pixels) == GOLDENS[name]["sha256"]
    assert intake.budget.used == Amount()


async def test_a_fetched_picture_becomes_the_reference_pixels(
    intake: MediaIntake, server: Server
) -> None:
    name = "photo_1008x1344.webp"
    server.routes["/x"] = fixed(read(name))
    with intake.ticket() as ticket:
        blob = await ticket.load(MediaSource("image", url=server.url("/x")), 0)
        assert intake.budget.used.nbytes == len(read(name))
        assert sha256(await ticket.decode(blob)) == GOLDENS[name]["sha256"]


async def test_a_file_becomes_the_reference_pixels(intake: MediaIntake) -> None:
    name = "palette_trns_203x151.png"
    url = f"file://{DATA / 'images' / name}"
    await intake.judge(MediaSource("image", url=url), 0)
    with intake.ticket() as ticket:
        blob = await ticket.load(MediaSource("image", url=url), 0)
        assert sha256(await ticket.decode(blob)) == GOLDENS[name]["sha256"]


async def test_inline_bytes_become_the_reference_pixels(intake: MediaIntake) -> None:
    name = "rgba_203x151.png"
    with intake.ticket() as ticket:
        assert (
            sha256(await ticket.decode(await ticket.load(image(name), 0)))
            == (GOLDENS[name]["sha256"])
        )


async def test_the_declared_media_type_does_not_matter(intake: MediaIntake) -> None:
    with intake.ticket() as ticket:
        url = data_url("tiny_20x30.png", "image/jpeg")
        blob = await ticket.load(MediaSource("image", url=url), 0)
        assert (await ticket.decode(blob)).shape == (30, 20, 3)


@pytest.mark.parametrize("name", ["animated_203x151.gif", "animated_203x151.webp"])
async def test_an_animation_is_one_picture(intake: MediaIntake, name: str) -> None:
    with intake.ticket() as ticket:
        pixels = await ticket.decode(await ticket.load(image(name), 0))
    assert sha256(pixels) == GOLDENS[name]["sha256"]


async def test_the_same_url_twice_in_a_request_is_fetched_once(
    intake: MediaIntake, server: Server
) -> None:
    server.routes["/x"] = fixed(read("tiny_20x30.png"), Cache_Control="no-store")
    source = MediaSource("image", url=server.url("/x"))
    with intake.ticket() as ticket:
        first, second = await asyncio.gather(ticket.load(source, 0), ticket.load(source, 1))
        third = await ticket.load(source, 2)
    assert [blob.index for blob in (first, second, third)] == [0, 1, 2]
    assert len(server.requests) == 1


async def test_a_failed_item_is_named_and_gives_back_what_it_took(intake: MediaIntake) -> None:
    with pytest.raises(Fault) as caught, intake.ticket() as ticket:
        await ticket.load(image("tiny_20x30.png"), 0)
        await ticket.load(MediaSource("image", data=b"not a picture"), 1)
    assert caught.value.reason is Reason.MEDIA_FORMAT_UNSUPPORTED
    assert caught.value.metadata["index"] == "1"
    assert intake.budget.used == Amount()


async def test_a_cancelled_download_gives_back_what_it_took(
    intake: MediaIntake, server: Server
) -> None:
    server.routes["/x"] = raw(
        b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n" + bytes(50_000), close=False
    )

    async def request() -> None:
        with intake.ticket() as ticket:
            await ticket.load(MediaSource("image", url=server.url("/x")), 0)

    task = asyncio.create_task(request())
    await server.reached(requests=1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_thread_at_work_keeps_its_reservation_until_it_ends(intake: MediaIntake) -> None:
    begun, go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(10)

    async def request() -> None:
        with intake.ticket() as ticket:
            await ticket.decode(await ticket.load(image("tiny_20x30.png"), 0))
            await ticket.run(work)

    task = asyncio.create_task(request())
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert intake.budget.used == Amount(len(read("tiny_20x30.png")), 600)
    go.set()
    await drained(intake)


async def test_work_that_has_not_begun_is_dropped_with_its_request() -> None:
    intake = MediaIntake(MediaLimits(worker_threads=1))
    begun, go = threading.Event(), threading.Event()
    ran = []

    async def hold() -> None:
        with intake.ticket() as ticket:
            await ticket.run(lambda: (begun.set(), go.wait(10)))

    async def later() -> None:
        with intake.ticket() as ticket:
            await ticket.run(lambda: ran.append(1))

    holding = asyncio.create_task(hold())
    await asyncio.to_thread(begun.wait, 10)
    waiting = asyncio.create_task(later())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    go.set()
    await holding
    await drained(intake)
    assert ran == []


@pytest.mark.parametrize(
    "limits",
    [
        MediaLimits(worker_threads=1, request_bytes=3000),
        MediaLimits(worker_threads=1, request_pixels=1100),
        MediaLimits(worker_threads=1, max_image_bytes=1500),
        MediaLimits(worker_threads=1, max_pixels=599),
        MediaLimits(worker_threads=1, budget_bytes=1500),
        MediaLimits(worker_threads=1, budget_pixels=599),
    ],
)
async def test_limits_of_item_request_and_process_are_told_apart_from_full(
    limits: MediaLimits,
) -> None:
    intake = MediaIntake(limits)
    with pytest.raises(Fault) as caught, intake.ticket() as ticket:
        for index in range(2):
            await ticket.decode(await ticket.load(image("tiny_20x30.png"), index))
    assert caught.value.reason is Reason.MEDIA_TOO_LARGE
    assert caught.value.retry_after is None
    await drained(intake)


async def test_a_reference_that_stands_twice_counts_once(server: Server) -> None:
    data = read("photo_640x480.jpg")
    go = asyncio.Event()

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await fixed(data)(request, writer)

    server.routes["/x"] = answer
    intake = MediaIntake(MediaLimits(fetch=OPEN, worker_threads=1, request_bytes=len(data) + 100))
    with intake.ticket() as ticket:
        source = MediaSource("image", url=server.url("/x"))
        loading = [asyncio.create_task(ticket.load(source, index)) for index in range(3)]
        await server.reached(requests=1)
        go.set()
        blobs = await asyncio.gather(*loading)
        assert [blob.index for blob in blobs] == [0, 1, 2]
        assert intake.budget.used.nbytes == len(data) == ticket.used.nbytes
    assert len(server.requests) == 1
    await drained(intake)


async def test_a_reference_that_stands_twice_counts_once_when_it_is_kept_too(
    server: Server,
) -> None:
    data = read("photo_640x480.jpg")
    server.routes["/x"] = fixed(data, Cache_Control="max-age=3600")
    limits = MediaLimits(
        fetch=OPEN, worker_threads=1, request_bytes=len(data) + 100, cache_bytes=1 << 20
    )
    intake = MediaIntake(limits)
    source = MediaSource("image", url=server.url("/x"))
    with intake.ticket() as ticket:
        await ticket.load(source, 0)
    for _ in range(2):
        with intake.ticket() as ticket:
            blobs = await asyncio.gather(*(ticket.load(source, index) for index in range(3)))
            assert [blob.index for blob in blobs] == [0, 1, 2]
            assert intake.budget.used.nbytes == len(data) == ticket.used.nbytes
    assert len(server.requests) == 1
    await drained(intake)


async def test_a_ticket_that_is_closed_keeps_nothing_that_comes_late() -> None:
    intake = MediaIntake(MediaLimits(worker_threads=1))
    with intake.ticket() as ticket:
        blob = await ticket.load(image("tiny_20x30.png"), 0)
    with pytest.raises(RuntimeError):
        await ticket.decode(blob)
    await drained(intake)


async def test_a_flood_stays_within_the_budget_and_the_rest_is_turned_away() -> None:
    data = read("photo_640x480.jpg")
    limits = MediaLimits(
        worker_threads=2,
        budget_bytes=len(data) * 40,
        budget_pixels=640 * 480 * 10,
        budget_wait=0.005,
    )
    intake = MediaIntake(limits)
    most = Amount()
    settled = asyncio.Event()
    waiting_for = 60

    def settle() -> None:
        nonlocal waiting_for
        waiting_for -= 1
        if waiting_for == 0:
            settled.set()

    async def request() -> Reason | None:
        nonlocal most
        try:
            with intake.ticket() as ticket:
                for index in range(4):
                    blob = await ticket.load(MediaSource("image", data=data), index)
                    await ticket.decode(blob)
                    used = intake.budget.used
                    most = Amount(max(most.nbytes, used.nbytes), max(most.pixels, used.pixels))
                settle()
                # Whoever got in stays in until all the others have been told.
                await settled.wait()
        except Fault as fault:
            settle()
            assert fault.retry_after
            return fault.reason
        return None

    outcomes = await asyncio.gather(*(request() for _ in range(60)))
    assert set(outcomes) <= {None, Reason.MEDIA_BUDGET_FULL}
    # Ten pictures fit, four a request: no more than two can be in at once.
    assert outcomes.count(None) <= 2
    assert most.fits(Amount(limits.budget_bytes, limits.budget_pixels))
    await drained(intake)


class TestJudge:
    """What a reference must pass before a worker sees it; nothing is fetched."""

    async def test_a_good_reference_elsewhere_passes_unread(self) -> None:
        intake = MediaIntake(MediaLimits(worker_threads=1))
        source = MediaSource("image", url="https://8.8.8.8/x.png?sig=1")
        assert await intake.judge(source, 0) == Glance()
        await drained(intake)

    @pytest.mark.parametrize("name", ["exif_6_24x16.jpg", "photo_640x480.jpg"])
    async def test_a_good_picture_at_hand_passes_with_its_upright_size(self, name: str) -> None:
        data = (Path(__file__).parents[1] / "data" / "images" / name).read_bytes()
        url = "data:text/plain;base64," + base64.b64encode(data).decode()
        intake = MediaIntake(MediaLimits(worker_threads=1))
        seen = await intake.judge(MediaSource("image", url=url), 0)
        assert seen == Glance((16, 24) if name.startswith("exif_6") else (640, 480), certain=True)
        await drained(intake)

    async def test_what_is_unpacked_to_be_judged_has_its_place_in_the_budget(self) -> None:
        data = read("photo_640x480.jpg")
        url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
        limits = MediaLimits(worker_threads=1, budget_bytes=2 * len(data), budget_wait=0.005)
        intake = MediaIntake(limits)
        used: list[int] = []

        def digest(content: bytes) -> str:
            used.append(intake.budget.used.nbytes)
            return "name"

        seen = await intake.judge(MediaSource("image", url=url), 0, digest=digest)
        assert seen.name == "name"
        assert used == [len(data)]
        other = intake.budget.open()
        await other.grow(Amount(nbytes=len(data) + 1000), index=0)
        with pytest.raises(Fault) as caught:
            await intake.judge(MediaSource("image", url=url), 3)
        assert caught.value.reason is Reason.MEDIA_BUDGET_FULL
        assert caught.value.metadata["index"] == "3"
        other.release()
        await drained(intake)

    async def test_the_header_of_a_large_file_is_not_read_on_the_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads: list[threading.Thread] = []

        def noting(data: bytes, **limits: Any) -> ImageHeader:
            threads.append(threading.current_thread())
            return sniff(data, **limits)

        monkeypatch.setattr(reader, "sniff", noting)
        intake = MediaIntake(MediaLimits(worker_threads=1))
        for data in (read("tiny_20x30.png"), read("tiny_20x30.png") + bytes(100_000)):
            url = "data:image/png;base64," + base64.b64encode(data).decode()
            assert (await intake.judge(MediaSource("image", url=url), 0)).size == (20, 30)
        small, large = threads
        assert small is threading.main_thread()
        assert large is not threading.main_thread()
        await drained(intake)

    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("data:image/png;base64,aGVsbG8=", Reason.MEDIA_FORMAT_UNSUPPORTED),
            ("data:,anything", Reason.MEDIA_FORMAT_UNSUPPORTED),
            ("data:image/jpeg;base64," + "A" * 100_000, Reason.MEDIA_FORMAT_UNSUPPORTED),
        ],
    )
    async def test_no_worker_is_asked_to_read_what_is_no_picture(
        self, url: str, reason: Reason
    ) -> None:
        intake = MediaIntake(MediaLimits(worker_threads=1))
        with pytest.raises(Fault) as caught:
            await intake.judge(MediaSource("image", url=url), 3)
        assert caught.value.reason is reason
        assert caught.value.metadata["index"] == "3"
        await drained(intake)

    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("", Reason.MEDIA_URL_INVALID),
            (r"http://127.0.0.1:6666\@1.1.1.1/x.png", Reason.MEDIA_URL_INVALID),
            ("http://127.0.0.%31/", Reason.MEDIA_URL_INVALID),
            ("https://bücher.example/x", Reason.MEDIA_URL_INVALID),
            ("data:image/png;base64,aGVsbG8", Reason.MEDIA_URL_INVALID),
            ("data:image/png;base64," + "A" * 99_999, Reason.MEDIA_URL_INVALID),
            ("s3://bucket/x", Reason.MEDIA_SCHEME_UNSUPPORTED),
            ("http://127.0.0.1/x", Reason.MEDIA_HOST_FORBIDDEN),
            ("http://[::ffff:169.254.169.254]/x", Reason.MEDIA_HOST_FORBIDDEN),
            ("http://localhost/x", Reason.MEDIA_HOST_FORBIDDEN),
            ("data:;base64," + "A" * 800_004, Reason.MEDIA_REF_TOO_LARGE),
            ("data:," + "%zz" * 200_001, Reason.MEDIA_REF_TOO_LARGE),
            ("file:///etc/passwd", Reason.FILE_FORBIDDEN),
            ("file://host/x.png", Reason.FILE_FORBIDDEN),
        ],
    )
    async def test_a_bad_one_is_refused_with_its_index(self, url: str, reason: Reason) -> None:
        limits = MediaLimits(
            worker_threads=1,
            max_image_bytes=600_000,
            local_root=Path("/srv/media"),
        )
        intake = MediaIntake(limits)
        with pytest.raises(Fault) as caught:
            await intake.judge(MediaSource("image", url=url), 4)
        assert caught.value.reason is reason
        assert caught.value.metadata["index"] == "4"
        await drained(intake)

    async def test_nothing_is_fetched(self, intake: MediaIntake, server: Server) -> None:
        await intake.judge(MediaSource("image", url=server.url("/x")), 0)
        assert server.connections == 0

    async def test_inline_bytes_cannot_be_forwarded(self, intake: MediaIntake) -> None:
        with pytest.raises(Fault) as caught:
            await intake.judge(image("tiny_20x30.png"), 2)
        assert caught.value.reason is Reason.MULTIMODAL_UNSUPPORTED_PART


class TestSecrets:
    """Neither credentials, nor queries, nor payloads, nor decoders' words get out."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda server: "https://u:p@h.example/x.jpg?token=SECRET",
            lambda server: server.url("/missing?token=SECRET"),
            lambda server: server.url("/damaged?token=SECRET"),
            lambda server: "http://127.0.0.1:1/SECRET?token=SECRET",
            lambda server: "data:image/png;base64,SECRETSECRET!",
            lambda server: "data:image/png;base64," + "SECRET00" * 700_000 + "!",
            lambda server: "file:///etc/SECRET",
            lambda server: f"file://{DATA}/images/SECRET.png",
        ],
    )
    async def test_a_fault_shows_none_of_them(
        self, intake: MediaIntake, server: Server, make: object, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert callable(make)
        server.routes["/missing"] = fixed(b"SECRET", status="404 Not Found")
        server.routes["/damaged"] = fixed(read("bad_truncated_half.png"))
        caplog.set_level("DEBUG")
        with pytest.raises(Fault) as caught, intake.ticket() as ticket:
            source = MediaSource("image", url=make(server))
            assert "SECRET" not in repr(source)
            await ticket.decode(await ticket.load(source, 0))
        shown = caught.value.message + str(caught.value.metadata) + caplog.text
        for secret in ("SECRET", "u:p", "0x", str(DATA), "libpng", "PIL"):
            assert secret not in shown
        assert len(shown) < 2000
