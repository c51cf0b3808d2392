"""Where media are processed: the whole table, row by row."""

from __future__ import annotations

import pytest

from router.faults import Fault, Reason
from router.request.plan import MediaItem, MediaPlan
from router.request.resolve import Mode, ModelView, Setting, Why, resolve

IMAGE = MediaItem(0, "image", "https", url="https://h/x.png")
VIDEO = MediaItem(0, "video", "https", url="https://h/x.mp4")
AUDIO = MediaItem(0, "audio", "https", url="https://h/x.wav")
INLINE = MediaItem(1, "image", "inline", data=b"x")
SHRUNK = MediaItem(1, "image", "https", url="https://h/x.png", max_long_side=100)
SLOWED = MediaItem(1, "video", "https", url="https://h/x.mp4", fps=1.0)

IMAGES_ONLY = frozenset({"image"})
BOTH = frozenset({"image", "video"})


def view(*advertised: bool, expandable: frozenset[str] = BOTH, encoders: bool = False) -> ModelView:
    return ModelView(expandable, advertised or (True, True), encoders)


@pytest.mark.parametrize(
    ("items", "model", "mode", "why"),
    [
        ((IMAGE,), view(), Mode.WORKER, Why.AUTO_UNIFORM),
        ((IMAGE, VIDEO), view(), Mode.WORKER, Why.AUTO_UNIFORM),
        ((IMAGE,), view(True), Mode.WORKER, Why.AUTO_UNIFORM),
        ((IMAGE,), view(True, False), Mode.ROUTER, Why.AUTO_MIXED),
        ((IMAGE,), view(False, True), Mode.ROUTER, Why.AUTO_MIXED),
        ((IMAGE,), view(False, False), Mode.ROUTER, Why.AUTO_NONE),
        ((IMAGE,), ModelView(BOTH, ()), Mode.ROUTER, Why.AUTO_NONE),
        ((IMAGE,), view(encoders=True), Mode.ROUTER, Why.EPD_UNSUPPORTED),
        ((IMAGE,), view(expandable=frozenset()), Mode.ROUTER, Why.MODEL_NOT_OPTED_IN),
        ((VIDEO,), view(expandable=IMAGES_ONLY), Mode.ROUTER, Why.PLAN_NOT_FORWARDABLE),
        ((IMAGE, INLINE), view(), Mode.ROUTER, Why.PLAN_NOT_FORWARDABLE),
        ((IMAGE, SHRUNK), view(), Mode.ROUTER, Why.PLAN_NOT_FORWARDABLE),
        ((IMAGE, SLOWED), view(), Mode.ROUTER, Why.PLAN_NOT_FORWARDABLE),
        ((AUDIO,), view(), Mode.ROUTER, Why.PLAN_NOT_FORWARDABLE),
        # What the request itself rules out comes before what the fleet does.
        ((INLINE,), view(False), Mode.ROUTER, Why.PLAN_NOT_FORWARDABLE),
        ((IMAGE,), view(False, expandable=frozenset()), Mode.ROUTER, Why.MODEL_NOT_OPTED_IN),
        ((IMAGE,), view(True, False, encoders=True), Mode.ROUTER, Why.EPD_UNSUPPORTED),
    ],
)
def test_auto(items: tuple[MediaItem, ...], model: ModelView, mode: Mode, why: Why) -> None:
    for override in (None, "auto"):
        resolution = resolve(MediaPlan(items), model, "auto", override)  # type: ignore[arg-type]
        assert (resolution.mode, resolution.why) == (mode, why)


@pytest.mark.parametrize("setting", ["auto", "router", "worker"])
def test_without_references_there_is_nothing_to_decide(setting: Setting) -> None:
    for override in (None, "router", "worker"):
        none = resolve(MediaPlan(), view(False), setting, override)  # type: ignore[arg-type]
        assert (none.mode, none.why) == (Mode.NONE, Why.NO_MEDIA)
        tensors = resolve(MediaPlan(tensors=True), view(), setting, override)  # type: ignore[arg-type]
        assert (tensors.mode, tensors.why) == (Mode.NONE, Why.CLIENT_TENSORS)


@pytest.mark.parametrize("items", [(IMAGE,), (INLINE,), (AUDIO,), (SHRUNK,)])
def test_the_kill_switch_takes_everything_into_the_router(items: tuple[MediaItem, ...]) -> None:
    resolution = resolve(MediaPlan(items), view(), "router")
    assert (resolution.mode, resolution.why) == (Mode.ROUTER, Why.CONFIG)


def test_strict_worker_mode_forwards_whatever_the_fleet_can_do() -> None:
    for model in (view(False), view(True, False), view(encoders=True)):
        resolution = resolve(MediaPlan((IMAGE,)), model, "worker")
        assert (resolution.mode, resolution.why) == (Mode.WORKER, Why.CONFIG)


def test_an_override_beats_the_setting_and_says_so() -> None:
    plan = MediaPlan((IMAGE,))
    here, there = (
        resolve(plan, view(), "worker", "router"),
        resolve(plan, view(), "router", "worker"),
    )
    assert (here.mode, here.why) == (Mode.ROUTER, Why.OVERRIDE)
    assert (there.mode, there.why) == (Mode.WORKER, Why.OVERRIDE)
    auto = resolve(plan, view(), "router", "auto")
    assert (auto.mode, auto.why) == (Mode.WORKER, Why.AUTO_UNIFORM)


@pytest.mark.parametrize(
    ("items", "model", "reason", "part", "index"),
    [
        ((IMAGE, INLINE), view(), Reason.MULTIMODAL_UNSUPPORTED_PART, "inline bytes", "1"),
        ((AUDIO,), view(), Reason.MULTIMODAL_UNSUPPORTED_PART, "audio", "0"),
        (
            (IMAGE, SHRUNK),
            view(),
            Reason.MULTIMODAL_HINT_UNSUPPORTED_IN_WORKER_MODE,
            "hint max_long_side_pixels",
            "1",
        ),
        (
            (VIDEO, SLOWED),
            view(),
            Reason.MULTIMODAL_HINT_UNSUPPORTED_IN_WORKER_MODE,
            "hint fps",
            "1",
        ),
        ((VIDEO,), view(expandable=IMAGES_ONLY), Reason.MULTIMODAL_UNSUPPORTED_PART, "video", "0"),
        # The first part that cannot go is the one that is named.
        ((IMAGE, INLINE, SHRUNK), view(), Reason.MULTIMODAL_UNSUPPORTED_PART, "inline bytes", "1"),
        (
            (SHRUNK, INLINE),
            view(),
            Reason.MULTIMODAL_HINT_UNSUPPORTED_IN_WORKER_MODE,
            "hint max_long_side_pixels",
            "1",
        ),
    ],
)
@pytest.mark.parametrize("by", ["setting", "override"])
def test_strict_worker_mode_names_the_part_that_cannot_go(
    items: tuple[MediaItem, ...], model: ModelView, reason: Reason, part: str, index: str, by: str
) -> None:
    with pytest.raises(Fault) as refused:
        if by == "setting":
            resolve(MediaPlan(items), model, "worker")
        else:
            resolve(MediaPlan(items), model, "router", "worker")
    assert refused.value.reason is reason
    assert refused.value.metadata == {"index": index, "part": part}
    assert part in refused.value.message and index in refused.value.message


def test_inline_bytes_with_a_hint_are_refused_as_inline_bytes() -> None:
    both = MediaItem(0, "image", "inline", data=b"x", max_long_side=10)
    with pytest.raises(Fault) as refused:
        resolve(MediaPlan((both,)), view(), "worker")
    assert refused.value.reason is Reason.MULTIMODAL_UNSUPPORTED_PART


def test_strict_worker_mode_refuses_a_model_that_is_not_opted_in() -> None:
    with pytest.raises(Fault) as refused:
        resolve(MediaPlan((IMAGE,)), view(expandable=frozenset()), "worker")
    assert refused.value.reason is Reason.MULTIMODAL_WORKER_PROCESSING_UNSUPPORTED_MODEL
