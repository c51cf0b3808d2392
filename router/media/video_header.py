"""What a clip says about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """Size in pixels (upright), number of frames, frames per second (0: unknown)."""

    width: int
    height: int
    frames: int
    fps: float

    @property
    def duration(self) -> float:
        """Seconds; 0 where the rate is unknown."""
        return self.frames / self.fps if self.fps else 0.0
