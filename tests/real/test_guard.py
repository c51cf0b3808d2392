"""Tensors that would end an engine for good are stopped at the router.

Each of these, sent to a worker itself, is followed by nothing but INTERNAL
from that worker, whose port stays open. They are made from tensors that the
worker takes, as recorded on the way from the router to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import pytest

from router.wire import engine
from tests.real.asking import IMAGE, ask, data_url, prompt, reason_of, ref, request
from tests.real.conftest import FLAGS
from tests.real.recorder import Recorder, recording
from tests.real.stack import Router, Stack

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

Change = Callable[[engine.GenerateRequest], None]


def placeholder_too_long(asked: engine.GenerateRequest) -> None:
    asked.mm_inputs.mm_placeholders[0].length += 1


def placeholder_past_the_prompt(asked: engine.GenerateRequest) -> None:
    asked.mm_inputs.mm_placeholders[0].offset = len(asked.tokenized.input_ids) - 1


def fewer_patches_than_the_grid_says(asked: engine.GenerateRequest) -> None:
    pixels = asked.mm_inputs.pixel_values
    row = len(pixels.inline) // pixels.shape[0]
    pixels.shape[0] -= 4
    pixels.inline = pixels.inline[: row * pixels.shape[0]]


def grid_larger_than_the_patches(asked: engine.GenerateRequest) -> None:
    grid = asked.mm_inputs.model_specific_tensors["image_grid_thw"]
    t, h, w = (int.from_bytes(grid.inline[i : i + 8], "little") for i in (0, 8, 16))
    grid.inline = b"".join(v.to_bytes(8, "little") for v in (t, h + 2, w))


def patches_per_image_not_matching(asked: engine.GenerateRequest) -> None:
    count = asked.mm_inputs.model_specific_tensors["patches_per_image"]
    count.inline = (int.from_bytes(count.inline, "little") - 4).to_bytes(8, "little")


def wrong_pixel_dimension(asked: engine.GenerateRequest) -> None:
    pixels = asked.mm_inputs.pixel_values
    pixels.shape[0] *= 2
    pixels.shape[1] //= 2


def grid_missing(asked: engine.GenerateRequest) -> None:
    del asked.mm_inputs.model_specific_tensors["image_grid_thw"]
    del asked.mm_inputs.batched_keys[:]
    asked.mm_inputs.batched_keys.append("patches_per_image")
    del asked.mm_inputs.keep_on_cpu_keys[:]


def longer_than_the_context(asked: engine.GenerateRequest) -> None:
    asked.tokenized.input_ids.extend([100] * 2048)


KILLERS: dict[Change, str] = {
    placeholder_too_long: "MALFORMED_TENSORS",
    placeholder_past_the_prompt: "MALFORMED_TENSORS",
    fewer_patches_than_the_grid_says: "MALFORMED_TENSORS",
    grid_larger_than_the_patches: "MALFORMED_TENSORS",
    patches_per_image_not_matching: "MALFORMED_TENSORS",
    wrong_pixel_dimension: "MALFORMED_TENSORS",
    grid_missing: "MALFORMED_TENSORS",
    longer_than_the_context: "PROMPT_TOO_LONG",
}


# The rest the worker serves without a word, and answers wrongly.
def placeholder_too_short(asked: engine.GenerateRequest) -> None:
    asked.mm_inputs.mm_placeholders[0].length -= 1


def one_hash_too_many(asked: engine.GenerateRequest) -> None:
    asked.mm_inputs.mm_hashes.append("another")


def text_instead_of_ids(asked: engine.GenerateRequest) -> None:
    asked.text = "What is it?"


WRONG: dict[Change, str] = {
    placeholder_too_short: "MALFORMED_TENSORS",
    one_hash_too_many: "MALFORMED_TENSORS",
    text_instead_of_ids: "INVALID_REQUEST",
}


@dataclass(frozen=True)
class Hop:
    """A router, and what passes between it and its worker."""

    router: Router
    recorder: Recorder


@pytest.fixture(scope="module")
def hop(stack: Stack) -> Iterator[Hop]:
    with recording(stack.worker("tensors").address) as recorder:
        # Inline, so that what passes can be sent again.
        router = stack.router("--worker", recorder.address, "--shm", "off", *FLAGS)
        yield Hop(router, recorder)
        router.stop()


async def taken(hop: Hop) -> tuple[engine.GenerateRequest, list[int]]:
    """A request with tensors as the worker takes them, and the ids that it answers."""
    ids = prompt(IMAGE, "What is in the picture?")
    answer = await ask(hop.router.address, request(ids, ref(data_url("grey_203x151.jpg"))))
    return engine.GenerateRequest.FromString(
        hop.recorder.of("Generate")[-1].raw_request
    ), answer.ids


async def test_the_tensors_that_it_would_make_itself_pass(hop: Hop) -> None:
    good, ids = await taken(hop)
    assert (await ask(hop.router.address, good)).ids == ids


@pytest.mark.parametrize("change", [*KILLERS, *WRONG], ids=lambda change: change.__name__)
async def test_broken_tensors_never_reach_a_worker(hop: Hop, change: Change) -> None:
    good, ids = await taken(hop)
    change(good)
    before = len(hop.recorder.of("Generate"))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await ask(hop.router.address, good)
    assert len(hop.recorder.of("Generate")) == before
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(error.value) == {**KILLERS, **WRONG}[change]
    # Neither the router nor the engine minds.
    assert (await taken(hop))[1] == ids
