"""Media references: what a worker fetches and decodes by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.wire import engine
from tests.workers.sim.client import (
    IMAGES,
    PICTURE,
    client_of,
    data_url,
    prompt,
    referring,
)
from workers.sim import SimOptions

PHOTO = "photo_640x480.jpg"
ASK = PICTURE + "Describe it"


async def test_a_picture_is_read_and_spoken_of() -> None:
    async with client_of() as client:
        text = await client.say(referring(ASK, data_url(PHOTO)))
    # 640x480 is a multiple of 32 and within the limits: 300 tokens, start, end, 11 bytes.
    assert text.startswith("I read 313 prompt tokens and 1 image.")
    assert "Image 1 is 640x480 pixels (grid 1x30x40), mean colour #" in text


async def test_another_picture_of_the_same_size_gives_another_answer() -> None:
    async with client_of() as client:
        first = await client.say(referring(ASK, data_url("grey_203x151.png")))
        other = await client.say(referring(ASK, data_url("palette_203x151.png")))
    assert first.split("mean colour")[0] == other.split("mean colour")[0]
    assert first != other


async def test_several_pictures_are_numbered_in_prompt_order() -> None:
    async with client_of() as client:
        text = await client.say(
            referring(PICTURE * 2 + "?", data_url(PHOTO), data_url("tall_7x903.png"))
        )
    assert "and 2 images." in text
    assert text.index("Image 1 is 640x480") < text.index("Image 2 is ")


async def test_files_are_offered_only_where_there_is_a_folder_of_them() -> None:
    for root, schemes in ((None, "data,http,https"), (IMAGES, "data,file,http,https")):
        async with client_of(SimOptions(local_root=root)) as client:
            info = await client.stub.GetServerInfo(engine.GetServerInfoRequest())
            assert info.mm_media_ref_schemes == schemes


@pytest.mark.parametrize("scheme", ["http", "file"])
async def test_pictures_come_from_hosts_and_files_as_well(scheme: str) -> None:
    async with client_of(SimOptions(local_root=IMAGES)) as client, _host() as host:
        url = str(host.make_url(f"/{PHOTO}")) if scheme == "http" else (IMAGES / PHOTO).as_uri()
        by_url = await client.say(referring(ASK, url))
        by_data = await client.say(referring(ASK, data_url(PHOTO)))
    assert by_url == by_data


@pytest.mark.parametrize(
    ("url", "status", "said"),
    [
        ("data:image/png;base64,!!!!", "INVALID_ARGUMENT", "media item 0"),
        ("", "INVALID_ARGUMENT", "media item 0"),
        ("ftp://host/picture.png", "INVALID_ARGUMENT", "media item 0"),
        (
            "{host}/missing.png",
            "INVALID_ARGUMENT",
            "Failed to fetch media from URL: HTTP 404 error",
        ),
        ("{host}/text.png", "INVALID_ARGUMENT", "Failed to load image: "),
        ("{host}/broken.png", "UNAVAILABLE", "media_refs[0]: fetch failed"),
        ("http://127.0.0.1:1/refused.png", "UNAVAILABLE", "media_refs[0]: fetch failed"),
        ("file:///etc/passwd", "INVALID_ARGUMENT", "media item 0"),
    ],
)
async def test_what_cannot_be_read_fails_as_in_a_worker(url: str, status: str, said: str) -> None:
    async with client_of() as client, _host() as host:
        base = str(host.make_url("/")).rstrip("/")
        error = await client.refusal(referring(ASK, url.replace("{host}", base)))
    assert error.code().name == status
    # Failures to fetch and to read are worded as a real worker words them.
    assert said in (error.details() or "")


async def test_a_host_that_says_nothing_is_given_up() -> None:
    async def silent(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    app = web.Application()
    app.add_routes([web.get("/", silent)])
    async with client_of(SimOptions(media_timeout=0.1)) as client, TestServer(app) as host:
        error = await client.refusal(referring(ASK, str(host.make_url("/"))))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_worker_fetches_as_often_as_it_is_told_to() -> None:
    fetched = 0

    async def count(_: web.Request) -> web.Response:
        nonlocal fetched
        fetched += 1
        return web.Response(body=(IMAGES / "tiny_28x28.jpg").read_bytes())

    app = web.Application()
    app.add_routes([web.get("/", count)])
    async with client_of() as client, TestServer(app) as host:
        for _ in range(3):
            await client.say(referring(ASK, str(host.make_url("/"))))
    assert fetched == 3


async def test_a_corrupt_picture_is_the_clients_fault() -> None:
    async with client_of() as client:
        error = await client.refusal(referring(ASK, data_url("bad_truncated_half.png")))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_more_items_than_allowed_are_refused() -> None:
    async with client_of(SimOptions(item_limits=(("image", 1),))) as client:
        error = await client.refusal(referring(PICTURE * 2, data_url(PHOTO), data_url(PHOTO)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 1 image" in (error.details() or "")


async def test_an_item_over_the_encoders_budget_is_refused() -> None:
    async with client_of(SimOptions(encoder_budget=299)) as client:
        error = await client.refusal(referring(ASK, data_url(PHOTO)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "300 feature tokens" in (error.details() or "")


async def test_fewer_anchors_than_items_are_an_internal_error() -> None:
    async with client_of() as client:
        error = await client.refusal(referring(PICTURE, data_url(PHOTO), data_url(PHOTO)))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert await client.say(prompt("still alive"))


async def test_more_anchors_than_items_are_served_without_a_word() -> None:
    async with client_of() as client:
        text = await client.say(referring(PICTURE * 2, data_url(PHOTO)))
    assert "and 1 image." in text


async def test_references_beside_a_text_prompt_tensors_or_nothing_are_refused() -> None:
    text = referring("", data_url(PHOTO))
    text.text = ASK
    both = referring(ASK, data_url(PHOTO))
    both.mm_inputs.mm_hashes.append("h")
    empty = prompt(ASK)
    empty.media_refs.SetInParent()
    unspecified = prompt(ASK)
    unspecified.media_refs.items.add(url=data_url(PHOTO))
    async with client_of() as client:
        for request in (text, both, empty, unspecified):
            assert (await client.refusal(request)).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("options", [SimOptions(mm_processor=""), SimOptions(model_type="qwen3")])
async def test_a_worker_without_a_processor_takes_no_references(options: SimOptions) -> None:
    async with client_of(options) as client:
        error = await client.refusal(referring(ASK, data_url(PHOTO)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_scheme_that_was_not_advertised_is_not_fetched() -> None:
    async with client_of(SimOptions(mm_schemes=("http",))) as client:
        error = await client.refusal(referring(ASK, data_url(PHOTO)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_pixel_limits_of_the_options_are_served_and_kept() -> None:
    async with client_of(SimOptions(max_pixels=320 * 256)) as client:
        text = await client.say(referring(ASK, data_url(PHOTO)))
    assert "Image 1 is 320x224 pixels" in text


def _host() -> TestServer:
    """Pictures under their names, a text that claims to be one, and a host error."""

    async def serve(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name == "broken.png":
            return web.Response(status=503)
        if name == "text.png":
            return web.Response(body=b"no picture at all", content_type="image/png")
        path = IMAGES / Path(name).name
        if not path.exists():
            return web.Response(status=404)
        return web.Response(body=path.read_bytes())

    app = web.Application()
    app.add_routes([web.get("/{name}", serve)])
    return TestServer(app)
