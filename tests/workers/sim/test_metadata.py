"""What the worker says about itself: health, model, server, tokenizer, reflection."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile

import grpc
import jinja2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tokenizers import Tokenizer

from router.wire import ENGINE_SERVICE, common, engine
from tests.workers.sim.client import Client, client_of, prompt
from workers.sim import SimOptions

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(client: Client, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
    stub = health_pb2_grpc.HealthStub(client.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return response.status


async def bundle(client: Client) -> dict[str, bytes]:
    call = client.stub.GetTokenizer(common.GetTokenizerRequest())
    chunks = [chunk async for chunk in call]
    archive = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


@pytest.mark.parametrize("service", ["", ENGINE_SERVICE])
async def test_health_knows_the_server_and_the_service(service: str) -> None:
    async with client_of() as client:
        assert await health(client, service) == SERVING
        await client.worker.set_serving(False)
        assert await health(client, service) == NOT_SERVING
        assert not (await client.stub.HealthCheck(engine.HealthCheckRequest())).healthy


async def test_health_of_an_unknown_service_is_not_found() -> None:
    async with client_of() as client:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await health(client, "nope")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_worker_that_warms_up_becomes_healthy_by_itself() -> None:
    async with client_of(SimOptions(warmup=0.2)) as client:
        stub = health_pb2_grpc.HealthStub(client.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=ENGINE_SERVICE))
        assert (await watch.read()).status == NOT_SERVING
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_reflection_lists_the_services() -> None:
    async with client_of() as client:
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        response = await call.read()
        names = {service.name for service in response.list_services_response.service}
        call.cancel()
    assert {ENGINE_SERVICE, "grpc.health.v1.Health"} <= names


async def test_model_info_names_the_model() -> None:
    options = SimOptions(model="org/model", served_model="alias", max_context=4096)
    async with client_of(options) as client:
        info = await client.stub.GetModelInfo(engine.GetModelInfoRequest())
    assert (info.model_path, info.served_model_name) == ("org/model", "alias")
    assert (info.model_type, info.supports_vision) == ("qwen3_vl", True)
    assert list(info.architectures) == ["Qwen3VLForConditionalGeneration"]
    assert info.max_context_length == 4096
    assert list(info.eos_token_ids) == [151645, 151643]


async def test_server_info_advertises_what_the_options_say() -> None:
    options = SimOptions(
        mm_schemes=("http", "data"),
        device_normalize=False,
        item_limits=(("image", 8), ("video", 2)),
        block_size=32,
        max_num_seqs=7,
        kv_connector="NixlConnector",
        kv_role="kv_producer",
        kv_engine_id="e1",
        pairing_protocol="p1",
        shm_namespace_id="s1",
        encoder_budget=99,
    )
    async with client_of(options) as client:
        info = await client.stub.GetServerInfo(engine.GetServerInfoRequest())
    assert info.mm_processor == "inprocess"
    assert info.mm_media_ref_schemes == "http,data"
    assert not info.mm_device_do_normalize
    assert info.mm_item_limits == "image=8,video=2"
    assert (info.block_size, info.max_num_seqs, info.mm_encoder_budget) == (32, 7, 99)
    assert (info.kv_connector, info.kv_role) == ("NixlConnector", "kv_producer")
    assert (info.kv_engine_id, info.pairing_protocol, info.shm_namespace_id) == ("e1", "p1", "s1")
    assert info.active_requests == 0


async def test_a_capability_can_change_while_the_worker_runs() -> None:
    async with client_of() as client:
        client.worker.change(mm_processor="", max_num_seqs=3)
        info = await client.stub.GetServerInfo(engine.GetServerInfoRequest())
        assert (info.mm_processor, info.mm_media_ref_schemes) == ("", "")
        assert info.max_num_seqs == 3
        with pytest.raises(ValueError, match="block_size"):
            client.worker.change(block_size=1)


async def test_a_text_model_advertises_no_media() -> None:
    async with client_of(SimOptions(model_type="qwen3")) as client:
        info = await client.stub.GetServerInfo(engine.GetServerInfoRequest())
        model = await client.stub.GetModelInfo(engine.GetModelInfoRequest())
        files = await bundle(client)
        assert await client.say(prompt("x"))
    assert (info.mm_processor, info.mm_item_limits) == ("", "")
    assert not model.supports_vision
    assert "preprocessor_config.json" not in files


async def test_the_bundle_holds_a_tokenizer_that_any_client_can_use() -> None:
    async with client_of() as client:
        files = await bundle(client)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    text = "Größe 漢字\n<|im_start|>user<|image_pad|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids[-1] == 151655
    assert bytes(ids[: len("Größe 漢字\n".encode())]).decode() == "Größe 漢字\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


async def test_the_bundle_describes_the_model_and_its_processors() -> None:
    async with client_of() as client:
        files = await bundle(client)
    config = json.loads(files["config.json"])
    assert config["model_type"] == "qwen3_vl"
    assert (config["image_token_id"], config["video_token_id"]) == (151655, 151656)
    image = json.loads(files["preprocessor_config.json"])
    assert image["size"] == {"shortest_edge": 65536, "longest_edge": 16777216}
    assert (image["patch_size"], image["merge_size"], image["temporal_patch_size"]) == (16, 2, 2)
    assert {"video_preprocessor_config.json", "generation_config.json"} <= files.keys()


async def test_the_chat_template_writes_one_anchor_a_picture() -> None:
    async with client_of() as client:
        files = await bundle(client)
    template = files["chat_template.jinja"].decode()
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == template
    message = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "Hi"}],
    }
    rendered = jinja2.Template(template).render(messages=[message], add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
        "<|vision_start|><|video_pad|><|vision_end|>Hi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_an_embedding_is_a_unit_vector_of_the_prompt() -> None:
    def request(*ids: int) -> engine.EmbedRequest:
        return engine.EmbedRequest(tokenized=engine.TokenizedInput(input_ids=ids))

    async with client_of() as client:
        first = await client.stub.Embed(request(1, 2, 3))
        again = await client.stub.Embed(request(1, 2, 3))
        other = await client.stub.Embed(request(1, 2, 4))
        with pytest.raises(grpc.aio.AioRpcError):
            await client.stub.Embed(request())
    assert first == again != other
    assert sum(value * value for value in first.embedding) == pytest.approx(1.0, abs=1e-5)
    assert (first.prompt_tokens, first.embedding_dim) == (3, len(first.embedding))


async def test_the_profiler_starts_once_and_stops_once() -> None:
    async with client_of() as client:
        start, stop = common.StartProfileRequest(), common.StopProfileRequest()
        assert (await client.stub.StartProfile(start)).success
        assert not (await client.stub.StartProfile(start)).success
        assert (await client.stub.StopProfile(stop)).success
        assert not (await client.stub.StopProfile(stop)).success


async def test_two_workers_cannot_take_one_port() -> None:
    async with client_of() as client:
        from workers.sim import SimWorker

        second = SimWorker()
        with pytest.raises(OSError, match="cannot listen"):
            await second.start(client.worker.address)
        await second.stop()
