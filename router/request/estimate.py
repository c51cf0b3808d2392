"""How long a forwarded prompt will be, from what can be seen without fetching.

A forwarded reference stands in the prompt as one token, and the worker
prefills thousands: load must be accounted at its expanded length.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.media.header import ImageHeader
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


def estimate_item(spec: ModelSpec, item: MediaItem, header: ImageHeader | None) -> Estimate:
    """A plan for a forwarded item.

    `header` is that of a picture at hand; one elsewhere is taken to be of
    typical size. Raises `Fault` for a picture at hand that the model does not
    take.
    """
    if header is not None:
        plan = spec.plan_image(header.width, header.height, index=item.index)
        return Estimate(plan, known=True)
    if item.modality == "video":
        plan = spec.plan_video(
            TYPICAL_WIDTH,
            TYPICAL_HEIGHT,
            index=item.index,
            total_frames=_TYPICAL_VIDEO_FRAMES,
            fps=_TYPICAL_VIDEO_FPS,
        )
        return Estimate(plan, known=False)
    plan = spec.plan_image(TYPICAL_WIDTH, TYPICAL_HEIGHT, index=item.index)
    return Estimate(plan, known=False)
