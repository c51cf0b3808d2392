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

    def __repr__(self) -> str:
        # Neither the reference nor the bytes belong into a log.
        if self.data is not None:
            return f"MediaSource({self.modality}, {len(self.data)} bytes)"
        return f"MediaSource({self.modality}, a URL of {len(self.url or '')} characters)"
