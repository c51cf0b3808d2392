import base64
import io
import json
import logging
from typing import Any

import pytest

from router.observe.logging import get_logger, set_level, without_secrets
from router.wire import admin
from tests.media.server import fixed, running
from tests.serving import PICTURE, Serving, data_url, image, seeing, serving, tokenized
from workers.sim import SimOptions

LINK = "https://u:p@h/x.jpg?token=SECRET"


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def event(stream: io.StringIO, name: str) -> dict[str, Any]:
    (found,) = [line for line in lines(stream) if line["event"] == name]
    return found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (LINK, "https://h/…"),
        ("see http://a.b:80/c?d=e#f now", "see http://a.b:80/… now"),
        ("http://h", "http://h"),
        ("'https://a:b@c?x=1' and gs://bucket/key", "'https://c/…' and gs://bucket/…"),
        ("data:image/png;base64,AAAA is broken", "data:… is broken"),
        ("user@host: 5 of 7", "user@host: 5 of 7"),
    ],
)
def test_urls_lose_all_but_scheme_and_host(text: str, told: str) -> None:
    assert without_secrets(text) == told


def test_an_exception_is_told_without_the_urls_in_its_message(logged: io.StringIO) -> None:
    try:
        raise ValueError(f"cannot read {LINK}")
    except ValueError as error:
        get_logger("test").error("failed", exc_info=error)
    told = event(logged, "failed")["exception"]
    assert "ValueError: cannot read https://h/…" in told
    assert "SECRET" not in logged.getvalue() and "u:p" not in logged.getvalue()


@pytest.mark.parametrize("length", range(470, 515))
def test_a_value_that_is_cut_within_a_url_tells_nothing_of_it(
    logged: io.StringIO, length: int
) -> None:
    get_logger("test").error("long", value="x" * length + " https://user:SECRET@a.example/path?q")
    told = event(logged, "long")["value"]
    assert told.endswith(f"… ({length + 37} characters)") or length + 37 <= 512
    assert "SEC" not in told and "user" not in told


def test_a_long_text_is_looked_through_in_one_go(logged: io.StringIO) -> None:
    """With a walk to its end from each of its dots this takes hours."""
    try:
        raise ValueError("a." * 1_000_000 + " http://h/secret")
    except ValueError as error:
        get_logger("test").error("failed", exc_info=error)
    assert event(logged, "failed")["exception"].split("…")[-2].endswith(" http://h/")


@pytest.mark.parametrize("character", ["x", "ж", "\x00", '"', "\ud800"])
def test_no_line_is_longer_than_two_kilobytes(logged: io.StringIO, character: str) -> None:
    values: dict[str, Any] = {f"key{i}": character * 5000 for i in range(12)}
    values["several"] = [character * 5000] * 20
    try:
        raise RuntimeError(character * 100_000)
    except RuntimeError as error:
        get_logger("test").error("long", exc_info=error, **values)
    logging.getLogger("library").warning("said %s", character * 100_000)
    for line in logged.getvalue().splitlines():
        assert len(line.encode(errors="backslashreplace")) <= 2048
    assert event(logged, "long")["room"] == "test"


def test_the_end_of_a_long_traceback_is_kept(logged: io.StringIO) -> None:
    def deep(n: int) -> None:
        if not n:
            raise RuntimeError("the cause")
        deep(n - 1)

    try:
        deep(100)
    except RuntimeError as error:
        get_logger("test").error("deep", exc_info=error)
    assert "RuntimeError: the cause" in event(logged, "deep")["exception"]


def test_a_level_counts_at_once_for_loggers_in_use(logged: io.StringIO) -> None:
    logger = get_logger("test")
    logger.info("one")
    set_level("warning")
    logger.info("two")
    logging.getLogger("library").warning("a library's")
    set_level("error")
    logger.warning("three")
    logging.getLogger("library").warning("another")
    set_level("debug")
    logger.debug("four")
    assert [line["event"] for line in lines(logged)] == ["one", "a library's", "four"]


# -- A whole router


async def served_lines(logged: io.StringIO, served: Serving, request: Any) -> list[dict[str, Any]]:
    await served.at_rest()
    return [line for line in lines(logged) if line.get("request") == request.request_id]


async def test_one_line_tells_of_a_request_and_every_line_carries_its_id(
    logged: io.StringIO,
) -> None:
    async with serving(SimOptions()) as served:
        request = tokenized("hello", request_id="r1", max_tokens=3)
        await served.generate(request)
        (line,) = await served_lines(logged, served, request)
    assert line["event"] == "request"
    assert (line["outcome"], line["output_tokens"], line["attempts"]) == ("ok", 3, 1)


async def test_a_failed_item_is_told_as_its_client_is(logged: io.StringIO) -> None:
    async with serving(SimOptions(), mm_processing="router") as served:
        request = seeing(f"{PICTURE * 2} what?", data_url("photo_640x480.jpg"), "ftp://h/SECRET")
        request.request_id = "r3"
        refused = await served.refusal(request)
        *_, line = await served_lines(logged, served, request)
    assert line["why"] == refused.message
    assert "media item 1" in line["why"]
    assert "SECRET" not in logged.getvalue()


async def test_what_an_item_is_is_told_without_its_path(logged: io.StringIO) -> None:
    set_level("debug")
    async with (
        running() as host,
        serving(SimOptions(mm_processor=""), media_allow_private_hosts=True) as served,
    ):
        host.routes["/SECRET.jpg"] = fixed(image("photo_640x480.jpg"))
        request = seeing(f"{PICTURE} what?", host.url("/SECRET.jpg?token=SECRET"))
        request.request_id = "r4"
        await served.generate(request)
        told = await served_lines(logged, served, request)
    (line,) = (line for line in told if line["event"] == "media")
    assert (line["index"], line["scheme"], line["host"]) == (0, "http", "127.0.0.1")
    assert (line["type"], line["nbytes"]) == ("JPEG", len(image("photo_640x480.jpg")))
    assert (line["width"], line["height"]) == (640, 480)
    assert "SECRET" not in logged.getvalue()


async def test_a_failed_fetch_tells_no_secret(logged: io.StringIO) -> None:
    async with serving(SimOptions(), mm_processing="router") as served:
        request = seeing(f"{PICTURE} what?", LINK)
        request.request_id = "r2"
        refused = await served.refusal(request)
        (line,) = await served_lines(logged, served, request)
        page = served.app.accounts.failures.latest_first()
    assert line["outcome"] == "client_fault"
    everything = [logged.getvalue(), refused.message, repr(refused.about), repr(page)]
    for text in everything:
        assert "SECRET" not in text and "u:p" not in text


@pytest.mark.parametrize("mode", ["router", "worker"])
async def test_a_missing_picture_s_signature_is_told_nowhere(
    logged: io.StringIO, mode: str
) -> None:
    async with (
        running() as host,
        serving(
            SimOptions(), mm_processing=mode, media_allow_private_hosts=True, retry_max_attempts=2
        ) as served,
    ):
        host.routes["/x.jpg"] = fixed(status="404 Not Found")
        request = seeing(f"{PICTURE} what?", host.url("/x.jpg?token=SECRET#PART"))
        refused = await served.refusal(request)
        await served.at_rest()
        page = served.app.accounts.failures.latest_first()
    assert host.requests[0].target == "/x.jpg?token=SECRET"
    # Whoever fetched it, the reason is the same.
    assert refused.reason == "MEDIA_NOT_FOUND"
    for text in (logged.getvalue(), refused.message, repr(refused.about), repr(page)):
        assert "SECRET" not in text and "PART" not in text and "x.jpg" not in text


async def test_a_broken_picture_of_megabytes_makes_short_lines(logged: io.StringIO) -> None:
    broken = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(5 << 20)).decode()
    async with serving(SimOptions(), mm_processing="router") as served:
        request = seeing(f"{PICTURE} what?", f"data:image/png;base64,{broken}")
        refused = await served.refusal(request)
        await served.at_rest()
    assert refused.reason.startswith("MEDIA_")
    assert len(refused.message) < 500
    assert max(map(len, logged.getvalue().splitlines())) < 2048


async def test_the_level_is_changed_through_the_admin_service(logged: io.StringIO) -> None:
    async with serving(SimOptions()) as served:
        answer = await served.admin.SetLogLevel(admin.SetLogLevelRequest(level=admin.WARNING))
        assert (answer.before, answer.level) == (admin.DEBUG, admin.WARNING)
        await served.generate(tokenized("hello", request_id="quiet", max_tokens=1))
        await served.at_rest()
        answer = await served.admin.SetLogLevel(admin.SetLogLevelRequest())
        assert (answer.before, answer.level) == (admin.WARNING, admin.WARNING)
    assert not [line for line in lines(logged) if line.get("request") == "quiet"]
