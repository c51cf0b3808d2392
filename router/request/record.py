"""What is known of a request, for its log line, its metrics and its trailing metadata."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.observe.metrics import UNKNOWN_MODEL
from router.request.attempt import Journey
from router.request.resolve import Resolution


@dataclass
class Record:
    """What is known of a request so far; filled as it goes, read when it ends."""

    request_id: str
    # How large the request's message was.
    nbytes: int = 0
    model: str = UNKNOWN_MODEL
    resolution: Resolution | None = None
    # Whether the request chose where its media are processed, and may not.
    override_ignored: bool = False
    prompt_tokens: int = 0
    # The item whose host had not delivered it when the request ended.
    unfetched: int | None = None
    journey: Journey = field(default_factory=Journey)
