"""What a client is told when its media cannot be had, in either mode."""

from __future__ import annotations

import grpc
import pytest

from router.wire import engine
from tests.real.asking import IMAGE, ask, data_url, prompt, reason_of, ref, request
from tests.real.conftest import FLAGS, router_for
from tests.real.media_host import MediaHost
from tests.real.stack import Stack, Worker

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

Code = grpc.StatusCode
MODES = pytest.mark.parametrize("mode", [engine.ROUTER, engine.WORKER], ids=["router", "worker"])


async def refused(address: str, asked: engine.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await ask(address, asked)
    assert isinstance(error.value, grpc.aio.AioRpcError)
    return error.value


UNREADABLE = {
    "bad_truncated_half.jpg": "MEDIA_DECODE_FAILED",
    "bad_text.jpg": "MEDIA_DECODE_FAILED",
    "data:image/jpeg;base64,@@@@": "MEDIA_URL_INVALID",
    "status/404": "MEDIA_NOT_FOUND",
    "status/403": "MEDIA_NOT_FOUND",
}


@MODES
@pytest.mark.parametrize("place", UNREADABLE)
async def test_media_that_nobody_can_read_is_the_clients_fault(
    stack: Stack, refs_worker: Worker, media_host: MediaHost, place: str, mode: engine.MmProcessing
) -> None:
    """With one reason in both modes, and no secret of the reference in the message."""
    router = router_for(stack, refs_worker)
    url = place if ":" in place else media_host.url(place + "?token=SECRET")
    error = await refused(router.address, request(prompt(IMAGE), ref(url), mode=mode))
    assert error.code() is Code.INVALID_ARGUMENT, error.details()
    assert reason_of(error) in (UNREADABLE[place], "MEDIA_FORMAT_UNSUPPORTED"), error.details()
    told = error.details() or ""
    assert "SECRET" not in told
    assert "0x" not in told


@MODES
@pytest.mark.parametrize("url", ["ftp://example.org/x.jpg", "file:///etc/hostname"])
async def test_a_reference_that_may_not_be_followed_is_refused(
    stack: Stack, refs_worker: Worker, url: str, mode: engine.MmProcessing
) -> None:
    router = router_for(stack, refs_worker)
    error = await refused(router.address, request(prompt(IMAGE), ref(url), mode=mode))
    assert error.code() in (
        Code.INVALID_ARGUMENT,
        Code.FAILED_PRECONDITION,
        Code.PERMISSION_DENIED,
    )
    assert reason_of(error).startswith(("MEDIA_", "FILE_"))
    assert "/etc" not in (error.details() or "")


@MODES
async def test_a_wrong_number_of_anchors_is_the_clients_fault(
    stack: Stack, refs_worker: Worker, mode: engine.MmProcessing
) -> None:
    """Sent to a worker itself, too few are INTERNAL, and too many an answer to something else."""
    router = router_for(stack, refs_worker)
    picture = ref(data_url("grey_203x151.jpg"))
    for anchors, items in ((0, 1), (1, 2), (2, 1)):
        asked = request(prompt(IMAGE * anchors, "Well?"), *[picture] * items, mode=mode)
        error = await refused(router.address, asked)
        assert (error.code(), reason_of(error)) == (Code.INVALID_ARGUMENT, "ANCHOR_MISMATCH")


@MODES
async def test_more_items_than_the_worker_allows_are_the_clients_fault(
    stack: Stack, refs_worker: Worker, mode: engine.MmProcessing
) -> None:
    router = router_for(stack, refs_worker)
    picture = ref(data_url("tiny_28x28.jpg"))
    asked = request(prompt(IMAGE * 5), *[picture] * 5, mode=mode)
    error = await refused(router.address, asked)
    assert (error.code(), reason_of(error)) == (Code.INVALID_ARGUMENT, "TOO_MANY_MEDIA_ITEMS")


@MODES
async def test_a_picture_that_fills_the_context_is_the_clients_fault(
    stack: Stack, refs_worker: Worker, mode: engine.MmProcessing
) -> None:
    """Two of 972 feature tokens each, in a context of 2048 with some text."""
    router = router_for(stack, refs_worker)
    pictures = [ref(data_url("photo_1920x1080.jpg"))] * 2
    asked = request(prompt(IMAGE, IMAGE, "well " * 200), *pictures, mode=mode)
    error = await refused(router.address, asked)
    assert error.code() is Code.INVALID_ARGUMENT
    if mode == engine.ROUTER:
        assert reason_of(error) == "PROMPT_TOO_LONG"


@MODES
@pytest.mark.parametrize("path", ["status/500", "reset", "cut"])
async def test_a_media_host_that_fails_is_not_the_workers_fault(
    stack: Stack, refs_worker: Worker, media_host: MediaHost, path: str, mode: engine.MmProcessing
) -> None:
    """However often: the breaker, at its most nervous, stays closed."""
    router = stack.router(
        *("--worker", refs_worker.address, "--breaker-min-calls", "1"),
        *("--breaker-failure-ratio", "0.1", "--retry-max-attempts", "1", *FLAGS),
    )
    for _ in range(2):
        asked = request(prompt(IMAGE), ref(media_host.url(path)), mode=mode)
        error = await refused(router.address, asked)
        assert error.code() is Code.UNAVAILABLE, error.details()
        assert reason_of(error) == "MEDIA_FETCH_FAILED"
    fine = request(prompt(IMAGE), ref(data_url("grey_203x151.jpg")), mode=mode)
    assert (await ask(router.address, fine)).ids
