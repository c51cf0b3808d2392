"""Sentences as vLLM 0.32 with smg-grpc-servicer 0.14.1 gave them."""

from __future__ import annotations

import grpc
import pytest

from router.faults import Reason
from router.request.worker_media import SomeItemFault, media_fault, presentable

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "cause",
    [
        "500, message='Internal Server Error', url='http://127.0.0.1:44747/500?token=SECRET'",
        "[Errno 104] Connection reset by peer",
        "Cannot connect to host 127.0.0.1:9 ssl:default [Connect call failed ('127.0.0.1', 9)]",
        "Cannot connect to host nowhere.invalid:80 ssl:default [Name or service not known]",
        "Response payload is not completed: <ContentLengthError: 400, message='Not enough data'>",
        "No module named 'av'",
    ],
)
def test_a_failed_fetch_is_the_media_hosts_whatever_it_sounds_like(cause: str) -> None:
    fault = media_fault(UNAVAILABLE, f"media_refs[2]: fetch failed: {cause}")
    assert fault is not None
    assert fault.reason is Reason.MEDIA_FETCH_FAILED
    assert fault.metadata["index"] == "2"
    assert "SECRET" not in str(fault)


@pytest.mark.parametrize(
    "details",
    [
        "failed to connect to all addresses; last error: UNKNOWN: Connection refused",
        "worker is saturated: 64 multimodal requests in flight and as many waiting",
        "Socket closed",
    ],
)
def test_the_workers_own_trouble_is_not_the_media_hosts(details: str) -> None:
    assert media_fault(UNAVAILABLE, details) is None


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        (
            "Failed to fetch media from URL: HTTP 404 error (parameter=image_url, "
            "value=http://127.0.0.1:44747/404?token=SECRET)",
            Reason.MEDIA_NOT_FOUND,
        ),
        (
            "Failed to load image: cannot identify image file <_io.BytesIO object at 0x7fbd>",
            Reason.MEDIA_DECODE_FAILED,
        ),
        (
            "Failed to load image: image file is truncated (41 bytes not processed)",
            Reason.MEDIA_DECODE_FAILED,
        ),
        ("Non-base64 digit found", Reason.MEDIA_URL_INVALID),
        (
            "media_refs[0]: Only base64 data URLs are supported for now.",
            Reason.MEDIA_URL_INVALID,
        ),
        (
            "media_refs[1]: url scheme 'ftp' is not accepted by this worker (accepted: data,http)",
            Reason.MEDIA_SCHEME_UNSUPPORTED,
        ),
    ],
)
def test_what_is_wrong_with_media_has_the_routers_reason(details: str, reason: Reason) -> None:
    fault = media_fault(INVALID, details)
    assert fault is not None
    assert fault.reason is reason
    assert "SECRET" not in str(fault)
    assert "0x" not in str(fault)


def test_an_item_is_named_where_it_can_be_known() -> None:
    named = media_fault(INVALID, "media_refs[3]: Only base64 data URLs are supported for now.")
    assert named is not None
    assert named.metadata["index"] == "3"
    assert str(named) == "media item 3: its data: URL is not base64"
    unnamed = media_fault(INVALID, "Failed to fetch media from URL: HTTP 403 error")
    assert isinstance(unnamed, SomeItemFault)
    assert str(unnamed) == "a media item: its host answered 403"
    assert unnamed.metadata == {"http_status": "403"}
    only = unnamed.at(0)
    assert (only.reason, str(only)) == (unnamed.reason, "media item 0: its host answered 403")
    assert only.metadata == {"index": "0", "http_status": "403"}


@pytest.mark.parametrize(
    "details",
    [
        "The decoder prompt (length 2995) is longer than the maximum model length of 2048.",
        "n must be 1 when using greedy sampling, got 1000.",
        "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
    ],
)
def test_other_sentences_are_left_as_they_are(details: str) -> None:
    assert media_fault(INVALID, details) is None
    assert presentable(details) == details


def test_a_sentence_is_shown_without_its_secrets() -> None:
    assert presentable("no: http://u:p@h.example:81/a/b.jpg?token=S (x)") == (
        "no: http://h.example/… (x)"
    )
    assert presentable("bad data:image/png;base64,AAAA here") == "bad data:… here"
    assert presentable("no file:///etc/passwd there") == "no file:///… there"
    assert presentable("<_io.BytesIO object at 0x7fbdede2e110>") == "an object"
    assert len(presentable("x" * 10_000)) == 500
