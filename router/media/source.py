"""One media item as the request names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Modality = Literal["image", "video"]


@dataclass(frozen=True, slots=True, repr=False)
class MediaSource:
    """A reference, or the bytes themselves."""

    modality: Modality
    url: str | None = None
    data: bytes | None = None

    @property
    def is_hosted(self) -> bool:
        """Whether a host has to be asked for it."""
        scheme, colon, _ = (self.url or "")[:6].partition(":")
        return bool(colon) and scheme.lower() in ("http", "https")

    def __repr__(self) -> str:
        # Neither the reference nor the bytes belong into a log.
        if self.data is not None:
            return f"MediaSource({self.modality}, {len(self.data)} bytes)"
        return f"MediaSource({self.modality}, a URL of {len(self.url or '')} characters)"
