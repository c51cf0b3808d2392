"""How long a forwarded prompt will be, from what can be seen without fetching.

A forwarded reference stands in the prompt as one token, and the worker
prefills thousands: load must be accounted at its expanded length.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass

from router.faults import Fault
from router.media.sniff import size_from_prefix
from router.request.plan import MediaItem
from router.vision.plan import ItemPlan, ModelSpec

# Seen in the field: a picture whose size is not known is most often a photo or
# a screenshot of about a megapixel.
TYPICAL_WIDTH, TYPICAL_HEIGHT = 1280, 720
_TYPICAL_VIDEO_FRAMES, _TYPICAL_VIDEO_FPS = 300, 30.0


@dataclass(frozen=True)
class Estimate:
    """`known` says that the plan is of the item's real size."""

    plan: ItemPlan
    known: bool


# A multiple of 4, so that base64 can be cut there: 64 KiB of the file.
_PREFIX_CHARACTERS = 87_384


def estimate_item(spec: ModelSpec, item: MediaItem) -> Estimate:
    """A plan for a forwarded item.

    The size of a `data:` picture is read off its header; a picture elsewhere
    is taken to be of typical size. Never fails: where the size cannot be read
    or planned, the typical one stands, and the worker says what is wrong.
    """
    if item.modality == "video":
        plan = spec.plan_video(
            TYPICAL_WIDTH,
            TYPICAL_HEIGHT,
            index=item.index,
            total_frames=_TYPICAL_VIDEO_FRAMES,
            fps=_TYPICAL_VIDEO_FPS,
        )
        return Estimate(plan, known=False)
    size = _size_of_data_url(item.url or "")
    if size is not None:
        try:
            return Estimate(spec.plan_image(*size, index=item.index), known=True)
        except Fault:
            size = None
    plan = spec.plan_image(TYPICAL_WIDTH, TYPICAL_HEIGHT, index=item.index)
    return Estimate(plan, known=False)


def _size_of_data_url(url: str) -> tuple[int, int] | None:
    head, comma, _ = url[:512].partition(",")
    if not head.lower().startswith("data:") or not comma or not head.lower().endswith(";base64"):
        return None
    payload = url[len(head) + 1 : len(head) + 1 + _PREFIX_CHARACTERS]
    payload = payload[: len(payload) // 4 * 4]
    try:
        return size_from_prefix(binascii.a2b_base64(payload))
    except binascii.Error:
        return None
