import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVICE = "vllm.grpc.engine.VllmEngine"
Status = health_pb2.HealthCheckResponse


def probe(*args: str) -> subprocess.CompletedProcess[str]:
    """The probe as an orchestrator runs it, in a process of its own, with more patience."""
    patience = ("--connect-timeout", "30s", "--rpc-timeout", "30s")
    command = [sys.executable, "-m", "router", "health", *patience, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def server_on(
    address: str,
    register: Callable[[grpc.Server], None] = lambda server: None,
    credentials: grpc.ServerCredentials | None = None,
) -> Iterator[str]:
    """A gRPC server; yields the address to probe."""
    server = grpc.server(ThreadPoolExecutor(4))
    register(server)
    port = (
        server.add_secure_port(address, credentials)
        if credentials
        else server.add_insecure_port(address)
    )
    server.start()
    try:
        yield address.replace(":0", f":{port}") if not address.startswith("unix:") else address
    finally:
        server.stop(grace=None).wait()


def standing(statuses: dict[str, int]) -> Callable[[grpc.Server], None]:
    def register(server: grpc.Server) -> None:
        servicer = health.HealthServicer()
        for service, status in statuses.items():
            servicer.set(service, status)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)

    return register


def test_serving_is_0() -> None:
    with server_on("127.0.0.1:0", standing({"": Status.SERVING})) as address:
        result = probe("--addr", address)
    assert (result.returncode, result.stdout) == (0, "status: SERVING\n")


def test_one_service_can_be_asked_for() -> None:
    statuses = {"": Status.SERVING, SERVICE: Status.NOT_SERVING}
    with server_on("127.0.0.1:0", standing(statuses)) as address:
        assert probe("--addr", address).returncode == 0
        result = probe("--addr", address, "--service", SERVICE)
    assert (result.returncode, result.stderr) == (4, "status: NOT_SERVING\n")


def test_a_unix_socket_can_be_probed(tmp_path: Path) -> None:
    with server_on(f"unix:{tmp_path}/s", standing({"": Status.SERVING})) as address:
        assert probe("--addr", address).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nonsense"],
        ["stray"],
        ["--connect-timeout", "soon"],
        ["--addr", "nowhere"],
        ["--addr", "127.0.0.1:99999"],
        ["--tls-ca", "ca.pem"],
        ["--tls", "--tls-ca", "/nonexistent/ca.pem"],
        ["--tls", "--tls-cert", "cert.pem"],
    ],
)
def test_bad_arguments_are_1(arguments: list[str]) -> None:
    result = probe(*arguments)
    assert result.returncode == 1
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_closed_port_is_2() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        result = probe("--addr", f"127.0.0.1:{bound.getsockname()[1]}", "--connect-timeout", "50ms")
    assert result.returncode == 2
    assert result.stderr == "error: could not connect within 50ms\n"


def test_a_port_that_never_speaks_is_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        result = probe("--addr", f"127.0.0.1:{mute.getsockname()[1]}", "--connect-timeout", "50ms")
    assert result.returncode == 2


def test_a_call_that_hangs_is_3() -> None:
    answered = threading.Event()

    class Hanging(health_pb2_grpc.HealthServicer):
        def Check(
            self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
        ) -> health_pb2.HealthCheckResponse:
            answered.wait(30)
            return health_pb2.HealthCheckResponse(status=Status.SERVING)

    def register(server: grpc.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(Hanging(), server)

    with server_on("127.0.0.1:0", register) as address:
        result = probe("--addr", address, "--rpc-timeout", "50ms")
        answered.set()
    assert (result.returncode, result.stderr) == (3, "error: no answer within 50ms\n")


def test_a_server_without_the_health_service_is_3() -> None:
    with server_on("127.0.0.1:0") as address:
        result = probe("--addr", address)
    assert result.returncode == 3
    assert "no gRPC health service" in result.stderr


def test_an_unknown_service_is_3() -> None:
    with server_on("127.0.0.1:0", standing({"": Status.SERVING})) as address:
        result = probe("--addr", address, "--service", "no.such.Service")
    assert result.returncode == 3
    assert "no.such.Service" in result.stderr


def test_a_proxy_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with server_on("127.0.0.1:0", standing({"": Status.SERVING})) as address:
        assert probe("--addr", address).returncode == 0
