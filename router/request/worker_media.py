"""What a worker says of media that it was to fetch, in the router's own terms.

A worker's sentence may carry a reference with its query, or the address of an
object, and whether its UNAVAILABLE is the media host's or its own shows in the
sentence alone. The wordings are those of vLLM's media connector and of its
gRPC servicer; what is not known is passed on with the secrets cut out.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import grpc

from router.faults import Fault, Reason

_ITEM = re.compile(r"media_refs\[(\d+)\]")
_FETCH_FAILED = re.compile(r"media_refs\[(\d+)\]: fetch failed")
_SCHEME = re.compile(r"media_refs\[(\d+)\]: url scheme '([a-z0-9+.-]{0,32})' is not accepted")
_HOST_REFUSED = re.compile(r"HTTP (4\d\d) error")
_UNREADABLE = re.compile(r"failed to (load|open|decode) (image|video)|cannot identify", re.I)
_NOT_BASE64 = re.compile(r"base64|incorrect padding", re.I)

_REFERENCE = re.compile(r"\b(?:https?|file)://[^\s'\"<>)]+|\bdata:[^\s'\"<>)]+")
_OBJECT = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>|\b0x[0-9a-f]{6,}\b", re.I)
_LONGEST = 500


class SomeItemFault(Fault):
    """A fault of a media item whose index the worker did not say."""

    def __init__(self, reason: Reason, what: str, **metadata: object) -> None:
        super().__init__(
            reason, f"a media item: {what}", metadata={k: str(v) for k, v in metadata.items()}
        )
        self._what = what

    def at(self, index: int) -> Fault:
        """The same of the item at `index`."""
        return Fault.of_item(self.reason, index, self._what, **self.metadata)


def media_fault(code: grpc.StatusCode, details: str) -> Fault | None:
    """The fault behind a worker's answer to a request with media references, if it is known."""
    if code is grpc.StatusCode.UNAVAILABLE:
        match = _FETCH_FAILED.search(details)
        # Whatever follows may sound like our own connection: "reset by peer".
        return match and Fault.of_item(
            Reason.MEDIA_FETCH_FAILED, int(match[1]), "the worker could not fetch it"
        )
    if code is not grpc.StatusCode.INVALID_ARGUMENT:
        return None
    if match := _SCHEME.search(details):
        return Fault.of_item(
            Reason.MEDIA_SCHEME_UNSUPPORTED, int(match[1]), "its URL scheme is not accepted"
        )
    if match := _HOST_REFUSED.search(details):
        fault = SomeItemFault(
            Reason.MEDIA_NOT_FOUND, f"its host answered {match[1]}", http_status=match[1]
        )
    elif _UNREADABLE.search(details):
        fault = SomeItemFault(Reason.MEDIA_DECODE_FAILED, "it could not be read")
    elif _NOT_BASE64.search(details):
        fault = SomeItemFault(Reason.MEDIA_URL_INVALID, "its data: URL is not base64")
    else:
        return None
    item = _ITEM.search(details)
    return fault.at(int(item[1])) if item else fault


def presentable(details: str) -> str:
    """A worker's sentence without paths, queries, payloads and addresses, and not too long."""
    cut = _OBJECT.sub("an object", _REFERENCE.sub(_shortened, details))
    return cut if len(cut) <= _LONGEST else cut[: _LONGEST - 1] + "…"


def _shortened(match: re.Match[str]) -> str:
    if match[0].startswith("data:"):
        return "data:…"
    try:
        parts = urlsplit(match[0])
        return f"{parts.scheme}://{parts.hostname or ''}/…"
    except ValueError:
        return "a reference"
