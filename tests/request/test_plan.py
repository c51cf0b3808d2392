"""What a request asks for, and what no worker could serve."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.faults import Fault, Reason
from router.request.plan import Part, plan
from router.wire import common, engine

Request = engine.GenerateRequest


def request(*urls: str, modality: common.Modality = common.IMAGE) -> Request:
    made = Request(tokenized=engine.TokenizedInput(input_ids=[1]))
    for url in urls:
        made.media_refs.items.add(modality=modality, url=url)
    return made


def test_items_stand_in_the_requests_order() -> None:
    made = request("https://h/a", "data:image/png;base64,AAAA", "HTTP://h/b")
    made.media_refs.items.add(modality=common.VIDEO, data=b"clip")
    items = plan(made).items
    assert [item.index for item in items] == [0, 1, 2, 3]
    assert [item.modality for item in items] == ["image", "image", "image", "video"]
    assert [item.scheme for item in items] == ["https", "data", "http", "inline"]
    assert items[3].data == b"clip" and items[3].url is None


def test_only_urls_need_a_scheme_of_a_worker() -> None:
    made = request("https://h/a")
    made.media_refs.items.add(modality=common.IMAGE, data=b"x")
    assert plan(made).schemes == {"https"}
    assert plan(made).modalities == {"image"}
    assert plan(made).count("image") == 2


def test_what_cannot_be_forwarded_is_told_of_the_first_item_that_cannot() -> None:
    made = request("https://h/a", "https://h/b", "https://h/c")
    made.media_refs.items[1].hints.fps = 2
    made.media_refs.items[2].hints.max_long_side_pixels = 5
    blocked = plan(made).blocked
    assert blocked is not None
    assert (blocked[0].index, blocked[1]) == (1, Part.HINT_FPS)
    assert plan(request("https://h/a")).blocked is None


def test_empty_hints_do_not_keep_an_item_from_a_worker() -> None:
    made = request("https://h/a")
    made.media_refs.items[0].hints.SetInParent()
    assert plan(made).blocked is None


def test_far_too_many_choices_are_refused() -> None:
    made = request()
    made.sampling_params.n = 16384
    assert plan(made).items == ()
    made.sampling_params.n = 4_000_000_000
    with pytest.raises(Fault, match="n is 4000000000; at most 16384") as refused:
        plan(made)
    assert refused.value.reason is Reason.INVALID_REQUEST


def test_far_too_many_items_are_refused_before_any_is_read() -> None:
    made = request("no URL at all")
    made.media_refs.items.extend([made.media_refs.items[0]] * 4096)
    with pytest.raises(Fault) as refused:
        plan(made)
    assert refused.value.reason is Reason.TOO_MANY_MEDIA_ITEMS
    assert refused.value.metadata == {"items": "4097", "limit": "4096"}
    del made.media_refs.items[0]
    with pytest.raises(Fault) as refused:
        plan(made)
    assert refused.value.reason is Reason.MEDIA_URL_INVALID


def test_a_text_prompt_has_no_media() -> None:
    assert plan(Request(text="x")).items == ()
    assert not plan(Request(text="x")).tensors


def with_field(change: Callable[[Request], object]) -> Request:
    made = request()
    change(made)
    return made


@pytest.mark.parametrize(
    "made",
    [
        Request(),
        Request(text=""),
        Request(tokenized=engine.TokenizedInput()),
        Request(tokenized=engine.TokenizedInput(original_text="only for people")),
        with_field(lambda r: r.media_refs.SetInParent()),
        with_field(lambda r: r.extra_mm_inputs.add()),
        with_field(lambda r: (r.mm_inputs.SetInParent(), r.media_refs.items.add())),
        with_field(lambda r: r.media_refs.items.add(url="https://h/x")),
        with_field(lambda r: r.media_refs.items.add(modality=99, url="https://h/x")),
        with_field(
            lambda r: r.media_refs.items.add(modality=common.IMAGE, url="https://h/x", data=b"x")
        ),
        with_field(
            lambda r: r.media_refs.items.add(
                modality=common.IMAGE,
                url="https://h/x",
                hints=engine.MediaHints(max_long_side_pixels=0),
            )
        ),
        *(
            with_field(
                lambda r, fps=fps: r.media_refs.items.add(  # type: ignore[misc]
                    modality=common.VIDEO, url="https://h/x", hints=engine.MediaHints(fps=fps)
                )
            )
            for fps in (0.0, -1.0, float("nan"), float("inf"))
        ),
        Request(text="x", media_refs=request("https://h/x").media_refs),
        Request(text="x", mm_inputs=engine.MultimodalInputs()),
    ],
)
def test_malformed_requests_are_invalid(made: Request) -> None:
    with pytest.raises(Fault) as refused:
        plan(made)
    assert refused.value.reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize("url", ["", "picture.png", "//h/x", "http:h", "http://", "h\\x:y"])
def test_a_reference_that_is_no_url_is_told_with_its_index(url: str) -> None:
    with pytest.raises(Fault) as refused:
        plan(request("https://h/a", url))
    assert refused.value.reason is Reason.MEDIA_URL_INVALID
    assert refused.value.metadata["index"] == "1"


def test_other_schemes_are_told_apart_from_no_url() -> None:
    for url in ("ftp://h/x", "javascript:alert(1)", "s3://bucket/x"):
        with pytest.raises(Fault) as refused:
            plan(request(url))
        assert refused.value.reason is Reason.MEDIA_SCHEME_UNSUPPORTED


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("kv_transfer_params", lambda r: r.kv_transfer_params.SetInParent()),
        ("kv_transfer_params_json", lambda r: setattr(r, "kv_transfer_params_json", "{}")),
        ("data_parallel_rank", lambda r: setattr(r, "data_parallel_rank", 0)),
    ],
)
def test_transfer_targets_come_from_clients_only_where_that_is_allowed(
    field: str, change: Callable[[Request], object]
) -> None:
    made = with_field(change)
    with pytest.raises(Fault) as refused:
        plan(made)
    assert refused.value.reason is Reason.TRANSFER_PARAMS_FORBIDDEN
    assert refused.value.metadata == {"field": field}
    assert plan(made, allow_transfer_params=True).items == ()
