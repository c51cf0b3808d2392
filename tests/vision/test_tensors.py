"""Building batches for the wire, and judging them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.faults import Fault, Reason
from router.vision.backend.cpu import CpuBackend
from router.vision.plan import Expanded, ItemPlan, ModelSpec, PixelFormat
from router.vision.tensors import Batch, build_batch, join, serialize, small_tensor
from router.vision.tensors_check import WireLimits, check_mm_inputs
from router.vision.values import round_to_bfloat16
from router.wire import common, engine
from tests.vision.families import spec_of
from tests.vision.pictures import golden

BACKEND = CpuBackend()
RAW = PixelFormat("uint8", normalized=False)
FLOAT = PixelFormat("float32", normalized=True)
IMAGE_PAD = 151655
SPEC = spec_of("qwen3_vl", golden("processors.json")["families"]["qwen3_vl"]["preprocessor_config"])


def built(
    sizes: tuple[tuple[int, int], ...] = ((320, 256), (256, 320)),
    pixel_format: PixelFormat = RAW,
    spec: ModelSpec = SPEC,
) -> tuple[Batch, Expanded]:
    noise = np.random.default_rng(7)
    plans: list[ItemPlan] = []
    arrays: list[np.ndarray] = []
    for index, (width, height) in enumerate(sizes):
        pixels = noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
        plans.append(spec.plan_image(width, height, index=index))
        arrays.append(spec.pack(plans[-1], pixels, pixel_format, BACKEND))
    expanded = spec.expand([1, *(token for _ in sizes for token in (5, IMAGE_PAD, 6))], plans)
    hashes = [f"{index:064x}" for index in range(len(sizes))]
    return build_batch(spec, plans, arrays, pixel_format, expanded.ranges, hashes), expanded


def checked(message: engine.MultimodalInputs, ids: Any, **limits: Any) -> Any:
    return check_mm_inputs([message], ids, SPEC, WireLimits(**limits))


def test_a_batch_has_the_layout_that_workers_take() -> None:
    batch, expanded = built()
    message = batch.message()
    assert message.modality == common.Modality.IMAGE
    assert message.im_token_id == IMAGE_PAD
    assert list(message.pixel_values.shape) == [320 + 320, 1536]
    assert message.pixel_values.dtype == "uint8"
    assert len(message.pixel_values.inline) == 640 * 1536
    grid = message.model_specific_tensors["image_grid_thw"]
    assert np.frombuffer(grid.inline, "<i8").reshape(2, 3).tolist() == [[1, 16, 20], [1, 20, 16]]
    assert dict(message.flat_keys) == {"pixel_values": "patches_per_image"}
    assert set(message.batched_keys) == {"image_grid_thw", "patches_per_image"}
    assert list(message.keep_on_cpu_keys) == ["image_grid_thw"]
    assert [(r.offset, r.length) for r in message.mm_placeholders] == list(expanded.ranges)
    assert len(message.mm_hashes) == 2


@pytest.mark.parametrize("pixel_format", [RAW, FLOAT, PixelFormat("bfloat16", normalized=True)])
@pytest.mark.parametrize("batches", [1, 2, 3])
def test_hand_framed_bytes_parse_to_the_message_protobuf_would_write(
    pixel_format: PixelFormat, batches: int
) -> None:
    batch, expanded = built(pixel_format=pixel_format)
    rest = engine.GenerateRequest(
        request_id="r-1",
        tokenized=engine.TokenizedInput(original_text="é", input_ids=expanded.ids.tolist()),
        stream=True,
    )
    naive = engine.GenerateRequest()
    naive.CopyFrom(rest)
    naive.mm_inputs.CopyFrom(batch.message())
    for _ in range(batches - 1):
        naive.extra_mm_inputs.add().CopyFrom(batch.message())
    assert engine.GenerateRequest.FromString(serialize(rest, [batch] * batches)) == naive


@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=3))
@settings(max_examples=25)
def test_framing_holds_at_every_length(sizes: list[int]) -> None:
    payload = tuple(np.arange(size, dtype=np.uint8) for size in sizes)
    head = engine.MultimodalInputs(mm_hashes=["h"])
    head.pixel_values.shape.append(sum(sizes))
    batch = Batch(head, payload)
    parsed = engine.GenerateRequest.FromString(serialize(engine.GenerateRequest(), [batch, batch]))
    assert parsed.mm_inputs == batch.message()
    assert list(parsed.extra_mm_inputs) == [batch.message()]


def test_items_of_other_sizes_are_padded_with_zeros() -> None:
    shape, parts = join([np.ones((1, 3, 2, 2), np.uint8), np.ones((1, 3, 1, 3), np.uint8)])
    assert shape == (2, 3, 2, 3)
    assert np.concatenate(parts)[0, 0].tolist() == [[1, 1, 0], [1, 1, 0]]
    assert np.concatenate(parts)[1, 0].tolist() == [[1, 1, 1], [0, 0, 0]]


def test_items_of_one_size_are_not_copied() -> None:
    arrays = [np.ones((4, 8), np.uint8), np.ones((2, 8), np.uint8)]
    _, parts = join(arrays)
    assert all(part is array for part, array in zip(parts, arrays, strict=True))


def test_our_own_tensors_pass() -> None:
    batch, expanded = built()
    result = checked(batch.message(), expanded.ids, pixels=RAW, item_limits={"image": 2})
    assert result.item_counts == (("image", 2),)
    assert result.largest_item_tokens == 80
    assert result.pixel_formats == (RAW,)


def test_names_of_tensors_that_are_not_there_mean_nothing() -> None:
    batch, expanded = built()
    message = batch.message()
    message.keep_on_cpu_keys.append("video_grid_thw")
    checked(message, expanded.ids)
    message.keep_on_cpu_keys.append("pixel_values")
    with pytest.raises(Fault, match="keep_on_cpu_keys"):
        checked(message, expanded.ids)


def test_pixels_beside_the_message_are_judged_by_their_size() -> None:
    batch, expanded = built()
    head = [batch.head]
    sizes = [batch.payload_bytes]
    check_mm_inputs(head, expanded.ids, SPEC, WireLimits(), pixel_bytes=sizes)
    with pytest.raises(Fault, match="size of their shape"):
        check_mm_inputs(head, expanded.ids, SPEC, WireLimits(), pixel_bytes=[sizes[0] - 1])


def set_tensor(name: str, values: Any, dtype: str = "int64") -> Callable[[Any, Any], None]:
    def change(message: engine.MultimodalInputs, ids: list[int]) -> None:
        message.model_specific_tensors[name].CopyFrom(small_tensor(np.array(values, dtype)))

    return change


def drop_row(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.pixel_values.shape[0] -= 1
    message.pixel_values.inline = message.pixel_values.inline[1536:]


def other_dim(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.pixel_values.shape[:] = [640 * 2, 768]


def shm_payload(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.pixel_values.shm.SetInParent()


def remote_payload(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.model_specific_tensors["image_grid_thw"].remote.SetInParent()


def no_payload(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.pixel_values.ClearField("payload")


def huge_shape(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.pixel_values.shape[:] = [2**32 - 1, 1536]


def many_dims(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.pixel_values.shape[:] = [2**32 - 1] * 5000


def longer_range(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.mm_placeholders[0].length += 1


def shorter_range(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.mm_placeholders[0].length -= 1


def past_the_end(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.mm_placeholders[1].offset = 2**32 - 2


def swapped(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.mm_placeholders.reverse()


def stray_anchor(message: engine.MultimodalInputs, ids: list[int]) -> None:
    ids.append(IMAGE_PAD)


def one_hash_more(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.mm_hashes.append("x")


def empty_hash(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.mm_hashes[0] = ""


def no_grid(message: engine.MultimodalInputs, ids: list[int]) -> None:
    del message.model_specific_tensors["image_grid_thw"]


def foreign_tensor(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.model_specific_tensors["x"].dtype = "int64"


def no_flat_key(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.flat_keys.clear()


def no_items(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.Clear()
    message.modality = common.Modality.IMAGE


def no_modality(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.modality = common.Modality.MODALITY_UNSPECIFIED


def other_token(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.im_token_id = 7


def odd_dtype(message: engine.MultimodalInputs, ids: list[int]) -> None:
    message.pixel_values.dtype = "complex128"


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (longer_range, "length"),
        (shorter_range, "length"),
        (past_the_end, "range"),
        (swapped, "range"),
        (stray_anchor, "uncovered"),
        (drop_row, "rows"),
        (other_dim, "pixel_dim"),
        (huge_shape, "payload_size"),
        (many_dims, "pixel_dim"),
        (no_payload, "payload"),
        (shm_payload, "payload"),
        (remote_payload, "payload"),
        (odd_dtype, "dtype"),
        (no_grid, "required_tensors"),
        (foreign_tensor, "required_tensors"),
        (no_flat_key, "keys"),
        (one_hash_more, "hashes"),
        (empty_hash, "hashes"),
        (no_items, "placeholders"),
        (no_modality, "modality"),
        (other_token, "im_token_id"),
        (set_tensor("image_grid_thw", [[1, 16, 22], [1, 20, 16]]), "grid"),
        (set_tensor("image_grid_thw", [[1, 16, 20], [1, 20, -16]]), "grid"),
        (set_tensor("image_grid_thw", [[1, 32, 10], [1, 20, 15]]), "grid"),
        (set_tensor("image_grid_thw", [[2**62, 2**62, 2**62], [1, 1, 1]]), "grid"),
        (set_tensor("image_grid_thw", [1, 16, 20, 1, 20, 16]), "shape"),
        (set_tensor("image_grid_thw", [[1, 16, 20]]), "shape"),
        (set_tensor("image_grid_thw", [[1, 16, 20], [1, 20, 16]], "float32"), "dtype"),
        (set_tensor("patches_per_image", [320, 319]), "grid"),
        (set_tensor("patches_per_image", [[320], [320]]), "shape"),
    ],
)
def test_what_would_kill_an_engine_is_refused(
    change: Callable[[engine.MultimodalInputs, list[int]], None], check: str
) -> None:
    batch, expanded = built()
    message, ids = batch.message(), expanded.ids.tolist()
    change(message, ids)
    with pytest.raises(Fault) as caught:
        checked(message, ids)
    assert caught.value.reason is Reason.MALFORMED_TENSORS
    assert caught.value.metadata["check"] == check


def test_limits_of_the_worker_are_kept() -> None:
    batch, expanded = built()
    tokens = len(expanded.ids)
    for limits, reason in (
        ({"item_limits": {"image": 1}}, Reason.TOO_MANY_MEDIA_ITEMS),
        ({"encoder_budget": 79}, Reason.MEDIA_ITEM_OVER_ENCODER_BUDGET),
        ({"context_length": tokens}, Reason.PROMPT_TOO_LONG),
    ):
        with pytest.raises(Fault) as caught:
            checked(batch.message(), expanded.ids, **limits)
        assert caught.value.reason is reason
    checked(
        batch.message(),
        expanded.ids,
        item_limits={"image": 2, "video": 0},
        encoder_budget=80,
        context_length=tokens + 1,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pixels_of_the_other_normalise_rule_are_refused(dtype: Any) -> None:
    normal, raw = PixelFormat(dtype, normalized=True), PixelFormat(dtype, normalized=False)
    for ours, wanted in ((normal, RAW), (raw, normal), (RAW, normal)):
        batch, expanded = built(pixel_format=ours)
        with pytest.raises(Fault) as caught:
            checked(batch.message(), expanded.ids, pixels=wanted)
        assert caught.value.metadata["check"] == "normalize"
    for ours, wanted in ((normal, normal), (raw, RAW)):
        batch, expanded = built(pixel_format=ours)
        assert checked(batch.message(), expanded.ids, pixels=wanted).pixel_formats == (ours,)


def test_two_batches_of_one_modality_are_refused() -> None:
    batch, expanded = built()
    with pytest.raises(Fault, match="two batches"):
        check_mm_inputs([batch.message()] * 2, expanded.ids, SPEC, WireLimits())


def test_video_for_a_batch_without_video_is_refused_by_name() -> None:
    batch, expanded = built()
    message = batch.message()
    message.modality = common.Modality.AUDIO
    with pytest.raises(Fault) as caught:
        checked(message, expanded.ids)
    assert caught.value.metadata["check"] == "modality"


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_hostile_bytes_never_crash_the_check(noise: bytes) -> None:
    batch, expanded = built(((320, 256),))
    raw = bytearray(batch.head.SerializeToString() + noise)
    for at in noise[:6]:
        raw[at % len(raw)] ^= noise[0]
    try:
        message = engine.MultimodalInputs.FromString(bytes(raw))
    except Exception:
        return
    try:
        checked(message, expanded.ids)
    except Fault:
        pass


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -0.7254902], np.float32)
    assert round_to_bfloat16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xBF3A]
