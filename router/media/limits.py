"""How much media may cost, in one place.

Sizes are bytes, times are seconds. Every default is a number an operator can
change; the names match the settings of `router.config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from router.media.header import ImageFormat

# JPEG 2000 is decoded where asked for, but its decoder is the one that hangs.
DEFAULT_FORMATS = frozenset(ImageFormat) - {ImageFormat.JPEG2000}

MIB = 1024 * 1024

# Pillow's bomb limit, which is also the workers': 178,956,970 pixels.
WORKER_MAX_PIXELS = 178_956_970


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What one download may cost and where it may go."""

    allow_private_hosts: bool = False
    # Empty means any host; "example.com" stands for itself and its subdomains.
    allowed_domains: tuple[str, ...] = ()
    use_env_proxies: bool = False
    user_agent: str = "mmrouter"
    connect_timeout: float = 5.0
    image_timeout: float = 10.0
    video_timeout: float = 30.0
    max_redirects: int = 5
    # Repeats after the first try, on 5xx answers and broken connections only.
    retries: int = 2
    retry_backoff: float = 0.05
    connections_per_host: int = 16
    resolver_threads: int = 64


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """What one clip may cost; its header is judged before a frame is decoded."""

    max_bytes: int = 512 * MIB
    max_duration: float = 3600.0
    max_frames: int = 200_000
    # Width times height of one frame.
    max_frame_pixels: int = 4096 * 4096
    # Of the frames that are kept, all together.
    max_total_pixels: int = WORKER_MAX_PIXELS * 2
    open_timeout: float = 10.0
    decode_timeout: float = 60.0


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Every bound of the media room."""

    max_image_bytes: int = 256 * MIB
    max_pixels: int = WORKER_MAX_PIXELS
    request_bytes: int = 512 * MIB
    request_pixels: int = 2 * WORKER_MAX_PIXELS
    budget_bytes: int = 2048 * MIB
    # 800 MP decoded are 2.4 GB of RGB.
    budget_pixels: int = 800_000_000
    budget_wait: float = 0.05
    budget_retry_after: float = 1.0
    local_root: Path | None = None
    formats: frozenset[ImageFormat] = DEFAULT_FORMATS
    # Red, green and blue behind transparent pictures; the workers' own is white.
    background: tuple[int, int, int] = (255, 255, 255)
    # 0: as many as the cores this process may use.
    worker_threads: int = 0
    # Of downloads and prepared tensors kept for reuse; 0 switches reuse off.
    cache_bytes: int = 512 * MIB
    # Decoder processes for the formats that are not decoded in this one.
    sandbox_processes: int = 1
    sandbox_memory: int = 4096 * MIB
    decode_timeout: float = 20.0
    fetch: FetchLimits = field(default_factory=FetchLimits)
    video: VideoLimits = field(default_factory=VideoLimits)
