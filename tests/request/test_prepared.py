"""The bytes of an attempt, and how long they are held."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from router.fleet.worker import Outgoing
from router.media.ticket import Clip
from router.media.video_header import VideoHeader
from router.request.prepared import Body
from router.request.tensors_out import Loaded, _pixels
from router.vision.ids import among
from router.vision.tensors import Batch
from router.wire import engine
from tests.vision.test_video import spec


@pytest.mark.parametrize("nbytes", [1000, 5 << 20])
async def test_bytes_made_in_a_thread_are_the_same(nbytes: int) -> None:
    head = engine.MultimodalInputs(mm_hashes=["h"])
    head.pixel_values.shape.append(nbytes)
    batch = Batch(head, (np.arange(nbytes, dtype=np.uint32).astype(np.uint8),))
    body = Body(engine.GenerateRequest(stream=True), [batch])
    wire = await body.wire_of("id-1")
    assert wire == body.wire("id-1")
    assert engine.GenerateRequest.FromString(wire).mm_inputs == batch.message()


def test_a_request_that_was_sent_is_let_go() -> None:
    outgoing = Outgoing(b"megabytes")
    assert outgoing.take() == b"megabytes"
    assert outgoing.take() == b""


@pytest.mark.parametrize("tokens", [(), (7,), (7, 9), (1,)])
def test_ids_among_tokens_are_those_that_numpy_finds(tokens: tuple[int, ...]) -> None:
    ids = np.array([7, 8, 9, 7, 0, 2**32 - 1], np.uint32)
    assert among(ids, tokens).tolist() == np.isin(ids, tokens).tolist()


async def test_a_frame_that_a_clip_shows_twice_is_there_twice() -> None:
    made = spec(num_frames=6)
    plan = made.plan_video(64, 64, index=0, total_frames=3, fps=24.0)
    asked: list[list[int]] = []

    class Frames:
        async def frames(self, clip: object, indices: Sequence[int]) -> np.ndarray:
            asked.append(list(indices))
            return np.zeros((len(indices), 64, 64, 3), np.uint8)

    clip = Clip(0, b"", VideoHeader(64, 64, 3, 24.0))
    pixels = await _pixels(Loaded(clip, plan), Frames())  # type: ignore[arg-type]
    assert asked == [[0, 0, 1, 1, 2, 2]]
    assert len(pixels) == len(plan.frames)
