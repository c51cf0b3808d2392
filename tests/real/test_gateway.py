"""A client that is not ours takes the router for one vLLM worker.

The gateway asks for health, model and server info, loads and the tokenizer,
applies the chat template, and either passes media references on, since the
router says that it takes them, or makes tensors itself. Its answers must be
those of the worker behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from router.wire import engine
from tests.real.asking import IMAGE, ask, data_url, prompt, ref, request, tokenizer
from tests.real.conftest import FLAGS, router_for
from tests.real.media_host import MediaHost
from tests.real.recorder import Recorder, diff, recording
from tests.real.stack import MODEL_NAME, Gateway, Stack, Worker

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

ROUND_ROBIN = ("--policy", "round_robin", "--mm-allow-private-media-hosts")
# Of its own installation, and of what a model with random weights writes.
NOT_OURS = ("smg::posture", "libturbojpeg", "invalid UTF-8 bytes in the token stream")

# Lossless: its JPEG decoder's pixels differ by some levels from those of vLLM's.
PICTURE = "text_800x1000.png"


class Setup:
    """A gateway in front of a router, with a recorder between."""

    def __init__(self, gateway: Gateway, recorder: Recorder) -> None:
        self.gateway = gateway
        self.recorder = recorder

    def chat(self, content: object, **options: object) -> Any:
        return self.gateway.post(
            "/v1/chat/completions",
            {
                "model": MODEL_NAME,
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": 12,
                "ignore_eos": True,
                "skip_special_tokens": False,
                **options,
            },
        )

    def last(self) -> engine.GenerateRequest:
        """What it sent last."""
        raw = self.recorder.of("Generate")[-1].raw_request
        return engine.GenerateRequest.FromString(raw)


@pytest.fixture(scope="module")
def forwarding(stack: Stack) -> Iterator[Setup]:
    """It passes references on, as it does by default to who takes them."""
    yield from _setup(stack)


@pytest.fixture(scope="module")
def processing(stack: Stack) -> Iterator[Setup]:
    """It makes tensors itself."""
    yield from _setup(stack, "--mm-processing", "router")


def _setup(stack: Stack, *flags: str) -> Iterator[Setup]:
    router = router_for(stack, stack.worker("refs"))
    with recording(router.address) as recorder:
        gateway = stack.gateway(recorder.address, *ROUND_ROBIN, *flags)
        try:
            yield Setup(gateway, recorder)
        finally:
            gateway.stop()


def picture(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def text_of(ids: list[int]) -> str:
    """Without a character that is cut off at the end, which the gateway leaves out."""
    decoded: str = tokenizer().decode(ids, skip_special_tokens=False)
    return decoded.rstrip("\ufffd")


def text_in(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text.rstrip("\ufffd")


def complaints_of(gateway: Gateway) -> list[str]:
    return [line for line in gateway.complaints() if not any(o in line for o in NOT_OURS)]


def test_it_registers_the_router_as_a_worker(forwarding: Setup) -> None:
    (worker,) = forwarding.gateway.get("/workers")["workers"]
    assert worker["is_healthy"]
    assert worker["runtime_type"] == "vllm"
    labels = worker["labels"]
    assert labels["served_model_name"] == MODEL_NAME
    assert labels["mm_processor"] == "router"
    assert labels["mm_item_limits"] == "image=4,video=1"
    assert labels["max_context_length"] == "2048"
    asked = {call.name for call in forwarding.recorder.calls}
    assert {"HealthCheck", "GetModelInfo", "GetServerInfo"} <= asked


def test_it_takes_the_tokenizer_from_the_router(stack: Stack) -> None:
    """As it does where the worker's model is on no disk of its own: here it is simulated."""
    router = stack.router("--sim", "1")
    with recording(router.address) as recorder:
        gateway = stack.gateway(recorder.address, *ROUND_ROBIN)
        try:
            assert len(recorder.of("GetTokenizer")) == 1
            assert gateway.get("/v1/models")["data"]
            assert complaints_of(gateway) == []
        finally:
            gateway.stop()
            router.stop()


async def test_text_is_answered_as_by_the_worker(refs_worker: Worker, forwarding: Setup) -> None:
    answer = forwarding.chat("Hello there")
    direct = await ask(refs_worker.address, request(prompt("Hello there")))
    assert text_in(answer) == text_of(direct.ids)
    assert answer["usage"]["prompt_tokens"] == direct.prompt_tokens
    assert answer["usage"]["completion_tokens"] == 12


async def test_several_choices_are_kept_apart(forwarding: Setup) -> None:
    answer = forwarding.chat("Hello there", n=2, temperature=0.8, seed=7)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("source", ["data", "http"])
async def test_references_that_it_passes_on_are_read(
    refs_worker: Worker, forwarding: Setup, media_host: MediaHost, source: str
) -> None:
    url = data_url(PICTURE) if source == "data" else media_host.url(PICTURE)
    answer = forwarding.chat([{"type": "text", "text": "What?"}, picture(url)])
    assert [item.url for item in forwarding.last().media_refs.items] == [url]
    direct = await ask(
        refs_worker.address,
        request(list(forwarding.last().tokenized.input_ids), ref(data_url(PICTURE))),
    )
    assert text_in(answer) == text_of(direct.ids)
    assert answer["usage"]["prompt_tokens"] == direct.prompt_tokens


@pytest.mark.parametrize("source", ["data", "http"])
async def test_tensors_that_it_makes_pass(
    refs_worker: Worker, processing: Setup, media_host: MediaHost, source: str
) -> None:
    url = data_url(PICTURE) if source == "data" else media_host.url(PICTURE)
    answer = processing.chat([picture(url), {"type": "text", "text": "What?"}])
    assert processing.last().HasField("mm_inputs")
    direct = await ask(refs_worker.address, request(prompt(IMAGE, "What?"), ref(data_url(PICTURE))))
    assert answer["usage"]["prompt_tokens"] == direct.prompt_tokens
    assert text_in(answer) == text_of(direct.ids)


# Names of no tensor, an order that means nothing, and identities, which are each its own.
IMMATERIAL = ("mm_hashes", "keep_on_cpu_keys", "batched_keys")


async def test_its_tensors_are_those_that_the_router_would_make(
    stack: Stack, refs_worker: Worker, processing: Setup
) -> None:
    """Two pipelines that share no code, compared field by field on the wire."""
    processing.chat([picture(data_url(PICTURE)), {"type": "text", "text": "What?"}])
    theirs = processing.recorder.of("Generate")[-1].request
    with recording(refs_worker.address) as recorder:
        router = stack.router("--worker", recorder.address, "--shm", "off", *FLAGS)
        try:
            asked = request(prompt(IMAGE, "What?"), ref(data_url(PICTURE)), mode=engine.ROUTER)
            await ask(router.address, asked)
        finally:
            router.stop()
        ours = recorder.of("Generate")[-1].request
    assert diff(theirs["tokenized"]["input_ids"], ours["tokenized"]["input_ids"]) == []
    lines = diff(theirs["mm_inputs"], ours["mm_inputs"])
    assert [line for line in lines if not line.startswith(IMMATERIAL)] == []


async def test_its_tensors_of_several_pictures_pass(processing: Setup) -> None:
    names = ("grey_203x151.png", "text_800x1000.png", "rgba_203x151.png")
    answer = processing.chat([picture(data_url(name)) for name in names])
    assert len(processing.last().mm_inputs.mm_placeholders) == 3
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("setup", ["forwarding", "processing"])
def test_it_has_nothing_to_complain_of(setup: str, request: pytest.FixtureRequest) -> None:
    """After all of the above, and a poll of the load."""
    gateway = request.getfixturevalue(setup).gateway
    assert gateway.get("/get_loads")
    assert complaints_of(gateway) == []
