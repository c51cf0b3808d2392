"""TLS on either side, certificates that are renewed, and bearer tokens."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router import config
from router.app import App
from router.rooms import CannotStart
from router.rpc import security
from router.wire import admin, engine, router_pb2_grpc
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub
from tests.e2e import certificates
from tests.e2e.certificates import Authority
from tests.serving import Refusal, Serving, eventually, refusal_of, serving, streamed, tokenized
from workers.sim import SimOptions, SimWorker
from workers.sim import worker as sim_worker


async def say(channel: grpc.aio.Channel, **metadata: str) -> int:
    """Generates; the number of messages."""
    call = VllmEngineStub(channel).Generate(
        tokenized("x"), timeout=20, metadata=tuple(metadata.items())
    )
    return len([response async for response in call])


async def fails(channel: grpc.aio.Channel) -> str:
    refused = await refusal_of(say(channel))
    assert refused.code is grpc.StatusCode.UNAVAILABLE
    return refused.message


# -- The listener


async def test_a_listener_with_tls_speaks_to_who_trusts_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("router")
    async with serving(SimOptions(), tls_cert=str(cert), tls_key=str(key)) as served:
        listen = served.app.listen
        async with grpc.aio.secure_channel(listen, certificates.client(authority.ca)) as channel:
            assert await say(channel)
        async with grpc.aio.insecure_channel(listen) as channel:
            await fails(channel)
        stranger = Authority(tmp_path / "stranger")
        async with grpc.aio.secure_channel(listen, certificates.client(stranger.ca)) as channel:
            await fails(channel)


async def test_a_client_has_to_show_a_certificate_where_that_is_asked_for(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("router")
    files = {"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(authority.ca)}
    own = authority.issue("client")
    strange = Authority(tmp_path / "strange").issue("client")
    async with serving(SimOptions(), **files) as served:
        for pair, welcome in ((own, True), (None, False), (strange, False)):
            credentials = certificates.client(authority.ca, pair)
            async with grpc.aio.secure_channel(served.app.listen, credentials) as channel:
                if welcome:
                    assert await say(channel)
                else:
                    await fails(channel)


async def test_a_renewed_certificate_is_shown_to_the_next_connection(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    cert, key = old.issue("router")
    async with serving(SimOptions(), tls_cert=str(cert), tls_key=str(key)) as served:
        listen = served.app.listen
        before = grpc.aio.secure_channel(listen, certificates.client(old.ca))
        call = VllmEngineStub(before).Generate(streamed("[[sim: hang-after-chunks=1]]"), timeout=20)
        await call.read()
        # First the certificate alone: nobody may be shown one whose key we do not have yet.
        fresh_cert, fresh_key = new.issue("router")
        cert.write_bytes(fresh_cert.read_bytes())
        async with grpc.aio.secure_channel(listen, certificates.client(old.ca)) as channel:
            assert await say(channel)
        key.write_bytes(fresh_key.read_bytes())
        async with grpc.aio.secure_channel(listen, certificates.client(new.ca)) as channel:
            assert await say(channel)
        async with grpc.aio.secure_channel(listen, certificates.client(old.ca)) as channel:
            await fails(channel)
        assert not call.done(), "streams that run are not touched"
        call.cancel()
        await before.close()


# -- Towards workers


@asynccontextmanager
async def tls_worker(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, *hosts: str
) -> AsyncIterator[SimWorker]:
    """A simulated worker that speaks TLS, and asks for certificates of the same authority."""
    credentials = certificates.server(authority.ca, authority.issue("worker", *hosts))

    def bind(server: grpc.aio.Server, listen: str) -> str:
        return f"127.0.0.1:{server.add_secure_port(listen, credentials)}"

    monkeypatch.setattr(sim_worker, "_bind", bind)
    worker = SimWorker(SimOptions())
    await worker.start("127.0.0.1:0")
    try:
        yield worker
    finally:
        await worker.stop(0)


def towards_workers(authority: Authority) -> dict[str, str]:
    cert, key = authority.issue("router")
    return {
        "worker_tls_ca": str(authority.ca),
        "worker_tls_cert": str(cert),
        "worker_tls_key": str(key),
    }


async def test_probes_and_calls_of_a_worker_use_the_same_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    async with (
        tls_worker(authority, monkeypatch) as worker,
        serving(worker.address, **towards_workers(authority)) as served,
    ):
        assert await say(served.channel)
        counted = worker.stats.calls
        await eventually(lambda: counted["GetLoads"] and counted["GetServerInfo"])


async def test_a_worker_s_certificate_may_carry_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    flags = towards_workers(authority)
    async with tls_worker(authority, monkeypatch, "workers.internal") as worker:
        async with serving(worker.address, ready=False, **flags) as served:
            await eventually(lambda: _reason(served).startswith("metadata: UNAVAILABLE"))
        named = {**flags, "worker_tls_server_name": "workers.internal"}
        async with serving(worker.address, **named) as served:
            assert await say(served.channel)


def _reason(served: Serving) -> str:
    (worker,) = served.app.registry
    return worker.state_reason


async def test_renewed_certificates_towards_workers_mean_new_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "_RENEWAL_INTERVAL", 0.02)
    authority = Authority(tmp_path)
    async with (
        tls_worker(authority, monkeypatch) as worker,
        serving(worker.address, **towards_workers(authority)) as served,
    ):
        (known,) = served.app.registry
        before = known.channel
        call = served.stub.Generate(streamed("[[sim: hang-after-chunks=1]]"), timeout=20)
        await call.read()
        authority.issue("router")
        await eventually(lambda: known.channel is not before)
        assert await say(served.channel)
        assert list(served.app.registry) == [known]
        assert not call.done()
        call.cancel()


# -- Tokens


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def assert_refused(refused: Refusal) -> None:
    assert refused.code is grpc.StatusCode.UNAUTHENTICATED
    assert refused.reason == "UNAUTHENTICATED"
    assert refused.domain == "mmrouter"
    assert refused.retry_after is None


async def test_clients_and_operators_have_tokens_of_their_own(tmp_path: Path) -> None:
    clients, operators = tmp_path / "clients", tmp_path / "operators"
    clients.write_text("# of team a\nalpha\n\n  beta  \n")
    operators.write_text("omega\n")
    files = {"client_tokens": str(clients), "admin_tokens": str(operators)}
    async with serving(SimOptions(), **files) as served:
        for token in ("alpha", "beta"):
            assert await say(served.channel, **bearer(token))
        for wrong in ("", "omega", "alph", "alphaa", "# of team a"):
            assert_refused(await refusal_of(say(served.channel, **bearer(wrong))))
        assert_refused(await refusal_of(say(served.channel)))
        assert_refused(await refusal_of(say(served.channel, authorization="Basic alpha")))
        stub = router_pb2_grpc.RouterAdminStub(served.channel)

        async def list_workers(token: str) -> admin.ListWorkersResponse:
            given = tuple(bearer(token).items())
            return await stub.ListWorkers(admin.ListWorkersRequest(), metadata=given, timeout=20)

        assert len((await list_workers("omega")).workers) == 1
        assert_refused(await refusal_of(list_workers("alpha")))
        counted = served.metric
        name = "router_unauthenticated_total"
        assert counted(name, service="vllm.grpc.engine.VllmEngine") == 7
        assert counted(name, service="mmrouter.v1.RouterAdmin") == 1
        assert served.workers[0].stats.calls["Generate"] == 2


async def test_unary_calls_need_a_token_too_and_health_needs_none(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alpha")
    async with serving(SimOptions(), client_tokens=str(tokens)) as served:
        call = served.stub.GetModelInfo(engine.GetModelInfoRequest(), timeout=20)
        assert_refused(await refusal_of(call))
        health = health_pb2_grpc.HealthStub(served.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_tokens_never_reach_a_worker(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alpha")
    async with serving(SimOptions(), client_tokens=str(tokens)) as served:
        await say(served.channel, **bearer("alpha"))
        (received,) = served.workers[0].stats.received
        assert "authorization" not in dict(received.metadata)


# -- Starting


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_cert": "gone.pem", "tls_key": "gone.key"}, "--tls-cert, .*gone.pem cannot"),
        ({"tls_cert": "rubbish.pem", "tls_key": "rubbish.key"}, "cannot be used"),
        ({"tls_cert": "a.pem", "tls_key": "b.key"}, "cannot be used"),
        ({"worker_tls_ca": "rubbish.pem"}, "--worker-tls-ca, .*/rubbish.pem cannot be used"),
        ({"client_tokens": "gone"}, "--client-tokens: .*/gone cannot be read: No such file"),
        ({"client_tokens": "empty"}, "--client-tokens: .*/empty holds no token"),
        ({"admin_tokens": "empty"}, "--admin-tokens: .*/empty holds no token"),
        ({"media_local_root": "gone"}, "--media-local-root .*gone is not a folder"),
        ({"media_local_root": "empty"}, "--media-local-root .*empty is not a folder"),
    ],
)
async def test_what_cannot_work_is_said_at_the_start(
    tmp_path: Path, settings: dict[str, str], said: str
) -> None:
    authority = Authority(tmp_path)
    for name in ("a", "b"):
        authority.issue(name)
    for name in ("rubbish.pem", "rubbish.key"):
        (tmp_path / name).write_text("not PEM")
    (tmp_path / "empty").write_text("# nobody\n\n")
    given = {name: str(tmp_path / file) for name, file in settings.items()}
    with pytest.raises(CannotStart, match=said):
        App(config.load({"listen": "127.0.0.1:0", "http": "", **given}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_cert": "a"}, "--tls-cert and --tls-key go together"),
        ({"worker_tls_key": "a"}, "--worker-tls-cert and --worker-tls-key go together"),
        ({"tls_client_ca": "a"}, "--tls-client-ca needs"),
    ],
)
def test_half_a_pair_is_a_bad_setting(settings: dict[str, str], said: str) -> None:
    with pytest.raises(config.ConfigError, match=said):
        config.load(settings)


async def test_commands_send_a_token_from_a_file(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alpha\n")
    files = {"client_tokens": str(tokens), "admin_tokens": str(tokens)}
    async with serving(SimOptions(), **files) as served:
        for command in (("workers", "list"), ("generate", "hello")):
            given = (*command, "--addr", served.app.listen)
            code, out = await run_command(*given, "--token-file", str(tokens))
            assert code == 0, out
            code, out = await run_command(*given)
            assert code == 1
            assert "UNAUTHENTICATED: the call carries no token" in out


async def run_command(*args: str) -> tuple[int, str]:
    """Exit code and everything that was printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "router", *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()
