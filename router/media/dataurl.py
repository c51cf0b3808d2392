"""The payload of a data: URL (RFC 2397), length first, decoded strictly.

The work is done in slices, so that a thread that decodes tens of megabytes
never holds the interpreter lock for more than a fraction of a millisecond.
"""

from __future__ import annotations

import binascii
from urllib.parse import unquote_to_bytes

import pybase64

from router.faults import Fault, Reason
from router.media.url import MediaUrl

# A multiple of 4, so that a slice ends where a base64 group does.
_SLICE = 1024 * 1024
_QUOTED_SLICE = 64 * 1024
_MAX_PERCENT_ENCODED = 4 * 1024 * 1024


def check_length(url: MediaUrl, *, limit: int, index: int) -> int:
    """An upper bound of the decoded size in bytes, from the length alone.

    Raises Fault MEDIA_REF_TOO_LARGE when the payload cannot be `limit` bytes or less.
    """
    text, start = url.text, url.payload_start
    length = len(text) - start
    most = length // 4 * 3 + 3 if url.base64 else length
    if most > limit:
        # An escape is three characters for one.
        escapes = text.count("%", start)
        least = length - 2 * escapes
        if url.base64:
            padding = 2 if escapes else text[-2:].count("=")
            least = least // 4 * 3 - padding
        check_size(least, limit=limit, index=index)
    return most


def check_size(size: int, *, limit: int, index: int) -> None:
    """Raises Fault MEDIA_REF_TOO_LARGE when a payload of `size` bytes is over `limit`."""
    if size > limit:
        raise Fault.of_item(
            Reason.MEDIA_REF_TOO_LARGE,
            index,
            f"the data: URL carries {size} bytes, the limit is {limit}",
            size=size,
            limit=limit,
        )


def is_plain_base64(url: MediaUrl) -> bool:
    """Whether the payload can be decoded as it stands, at gigabytes a second."""
    return url.base64 and url.text.find("%", url.payload_start) < 0


def decode(url: MediaUrl, *, index: int) -> bytes:
    """The bytes a data: URL carries.

    A base64 payload may be percent-encoded; beneath that it must be exactly the
    standard alphabet with its padding. Raises Fault MEDIA_URL_INVALID.
    """
    text, start = url.text, url.payload_start
    if not url.base64:
        return _unquoted(text, start, index)
    if text.find("%", start) >= 0:
        text, start = _unquoted(text, start, index).decode("latin-1"), 0
    try:
        return b"".join(
            # Padding may only stand in the last group of the last slice; in an
            # earlier slice it is refused below.
            _slice(text[at : at + _SLICE], last=at + _SLICE >= len(text))
            for at in range(start, len(text), _SLICE)
        )
    except (binascii.Error, ValueError) as error:
        raise Fault.of_item(
            Reason.MEDIA_URL_INVALID, index, "the data: URL is not valid base64"
        ) from error


def _unquoted(text: str, start: int, index: int) -> bytes:
    """Percent-decodes a payload in slices, for the library takes 85 times a text's size.

    Raises Fault MEDIA_REF_TOO_LARGE beyond what anybody would encode that way.
    """
    if len(text) - start > _MAX_PERCENT_ENCODED and text.find("%", start) >= 0:
        raise Fault.of_item(
            Reason.MEDIA_REF_TOO_LARGE,
            index,
            f"the percent-encoded data: URL carries {len(text) - start} characters, the limit is "
            f"{_MAX_PERCENT_ENCODED}; use base64",
            size=len(text) - start,
            limit=_MAX_PERCENT_ENCODED,
        )
    payload = _ascii(text, start, index)
    pieces = []
    at = 0
    while at < len(payload):
        end = min(at + _QUOTED_SLICE, len(payload))
        # An escape of three characters stays in one piece.
        escape = payload.rfind("%", end - 2, end)
        if escape > at and end < len(payload):
            end = escape
        pieces.append(unquote_to_bytes(payload[at:end]))
        at = end
    return b"".join(pieces)


def _slice(text: str, *, last: bool) -> bytes:
    if not last and text.endswith("="):
        raise ValueError("padding before the end")
    return pybase64.b64decode(text, validate=True)


def _ascii(text: str, start: int, index: int) -> str:
    payload = text[start:]
    if not payload.isascii():
        raise Fault.of_item(
            Reason.MEDIA_URL_INVALID, index, "the data: URL contains characters outside ASCII"
        )
    return payload
