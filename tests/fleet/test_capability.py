"""What is read from a worker's own words, and what silence means."""

from __future__ import annotations

import pytest

from router.fleet.capability import Capability, parse_item_limits
from router.wire import engine


def read(model: engine.GetModelInfoResponse | None = None, **server: object) -> Capability:
    return Capability.from_info(
        model or engine.GetModelInfoResponse(model_path="/models/m"),
        engine.GetServerInfoResponse(**server),  # type: ignore[arg-type]
    )


def test_a_worker_that_says_nothing_has_no_limits() -> None:
    silent = read()
    assert not silent.takes_media_refs
    assert silent.schemes == frozenset()
    assert dict(silent.item_limits) == {}
    assert silent.encoder_budget is None
    assert silent.context_length is None
    assert silent.max_num_seqs is None
    assert silent.block_size is None
    assert silent.data_parallel_size == 1


def test_numbers_below_zero_say_nothing() -> None:
    odd = read(mm_encoder_budget=-1, max_num_seqs=-2, block_size=-3, data_parallel_size=-4)
    assert odd.encoder_budget is None
    assert odd.max_num_seqs is None
    assert odd.block_size is None
    assert odd.data_parallel_size == 1


def test_the_served_name_is_the_path_where_there_is_no_other() -> None:
    assert read().served_name == "/models/m"
    named = engine.GetModelInfoResponse(model_path="/models/m", served_model_name="m")
    assert (read(named).served_name, read(named).model_path) == ("m", "/models/m")


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred", "x" * 513])
def test_what_is_no_name_is_a_value_error(name: str) -> None:
    for field in ("served_model_name", "model_path", "model_type"):
        with pytest.raises(ValueError, match=f"^{field} is not a name$"):
            read(engine.GetModelInfoResponse(**{field: name}))  # type: ignore[arg-type]
    for field in ("mm_processor", "kv_connector", "kv_engine_id", "pairing_protocol"):
        with pytest.raises(ValueError, match=f"^{field} is not a name$"):
            read(**{field: name})


@pytest.mark.parametrize("processor", ["inprocess", "redis", "smg", "anything"])
def test_any_processor_takes_references(processor: str) -> None:
    assert read(mm_processor=processor).takes_media_refs


def test_schemes_are_read_whatever_their_case_and_spacing() -> None:
    schemes = read(mm_media_ref_schemes=" HTTP, https,,data ").schemes
    assert schemes == {"http", "https", "data"}


def test_dtypes_lose_torchs_prefix() -> None:
    capability = read(multimodal_encoder_dtype="torch.bfloat16", model_dtype="torch.float16")
    assert (capability.encoder_dtype, capability.model_dtype) == ("bfloat16", "float16")


def test_item_limits_are_read_by_modality() -> None:
    assert parse_item_limits("image=8,video=2") == {"image": 8, "video": 2}
    assert parse_item_limits(" Image = 8 , ") == {"image": 8}
    assert parse_item_limits("image=0") == {"image": 0}
    assert parse_item_limits("") == {}


@pytest.mark.parametrize(
    "text", ["image", "image=", "image=many", "image=-1", "image=1.5", "=²", "image=9999999999"]
)
def test_malformed_item_limits_are_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_item_limits(text)


def test_numbers_that_cannot_be_are_not_known() -> None:
    odd = read(max_num_seqs=-1, block_size=-5, mm_encoder_budget=-1, data_parallel_size=-3)
    assert (odd.max_num_seqs, odd.block_size, odd.encoder_budget) == (None, None, None)
    assert odd.data_parallel_size == 1


def test_a_worker_that_names_no_model_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="names no model"):
        read(engine.GetModelInfoResponse(model_type="qwen3_vl"))
