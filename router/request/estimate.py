"""How long a forwarded prompt will be, from what can be seen without fetching.

A forwarded reference stands in the prompt as one token, and the worker
prefills thousands: load must be accounted at its expanded length.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.faults import Fault
from router.media.intake import Glance
from router.request.plan import MediaItem
from router.vision.plan import ItemPlan, ModelSpec

# Seen in the field: a picture whose size is not known is most often a photo or
# a screenshot of about a megapixel.
TYPICAL_WIDTH, TYPICAL_HEIGHT = 1280, 720
_TYPICAL_VIDEO_FRAMES, _TYPICAL_VIDEO_FPS = 300, 30.0


@dataclass(frozen=True)
class Estimate:
    """`known` says that the plan is of the item's own size, as far as can be seen, and
    `certain` that no other can be meant.
    """

    plan: ItemPlan
    known: bool
    certain: bool = False


def estimate_item(spec: ModelSpec, item: MediaItem, seen: Glance) -> Estimate:
    """A plan for a forwarded item.

    A picture elsewhere whose size was not seen is taken to be of typical size.
    Raises `Fault` for a picture at hand that the model does not take.
    """
    if seen.size is not None:
        try:
            plan = spec.plan_image(*seen.size, index=item.index)
            return Estimate(plan, known=True, certain=seen.certain)
        except Fault:
            # Of one elsewhere only the first bytes were seen, and the worker has the say.
            if seen.certain:
                raise
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
