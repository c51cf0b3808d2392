"""The launcher with a small server in vLLM's place."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from workers.vllm.process import WorkerProcess, free_port

ROOT = Path(__file__).parents[3]

# `python -m vllm.entrypoints.cli.main serve MODEL …`, as far as the launcher can see.
VLLM = """
import os, signal, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

manner = os.environ["MANNER"]
if manner == "ends":
    sys.exit(3)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), child.pid, flush=True)
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
flags = sys.argv
server.add_insecure_port("127.0.0.1:" + flags[flags.index("--port") + 1])
server.start()

def end(*_):
    if manner != "stubborn":
        sys.exit(0)

signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
while True:
    time.sleep(60)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    package = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(VLLM)
    for name, version in (
        ("vllm", "0.32.0"),
        ("smg_grpc_servicer", "0.14.1"),
        ("smg_grpc_proto", "0.4.28"),
    ):
        info = tmp_path / "site" / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


async def launcher(model: Path, manner: str, *flags: str) -> asyncio.subprocess.Process:
    env = os.environ | {"MANNER": manner, "PYTHONPATH": f"{model.parent / 'site'}:{ROOT}"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "vllm", str(model), "--listen", "127.0.0.1:0", *flags),
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def pids_of(process: asyncio.subprocess.Process) -> tuple[int, int]:
    """The worker's own and its engine's."""
    assert process.stderr is not None
    word, worker, engine = (await process.stderr.readline()).split()
    assert word == b"pids"
    return int(worker), int(engine)


async def test_it_says_where_it_serves_and_stops_the_worker_and_its_children(model: Path) -> None:
    process = await launcher(model, "kind")
    worker, engine = await pids_of(process)
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"listening on 127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"", b"")
    await gone(worker)
    await gone(engine)


async def test_a_worker_that_does_not_stop_is_killed(model: Path) -> None:
    process = await launcher(model, "stubborn", "--stop-timeout", "200ms")
    worker, engine = await pids_of(process)
    assert process.stdout is not None
    await process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = await process.communicate()
    assert process.returncode == 0
    assert b"did not stop within 200ms and was killed" in err
    await gone(worker)
    await gone(engine)


async def test_a_worker_that_never_serves_is_told_with_its_exit_code(model: Path) -> None:
    process = await launcher(model, "ends")
    out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert err == b"error: vLLM ended before it served (exit code 3)\n"


async def test_a_worker_that_dies_takes_the_launcher_and_its_children_along(model: Path) -> None:
    process = await launcher(model, "kind")
    worker, engine = await pids_of(process)
    assert process.stdout is not None
    await process.stdout.readline()
    os.kill(worker, signal.SIGUSR1)
    _, err = await process.communicate()
    assert process.returncode == 1
    assert err == b"error: vLLM ended by itself (exit code 7)\n"
    await gone(worker)
    await gone(engine)


async def test_it_says_what_is_missing(model: Path) -> None:
    process = await launcher(model, "kind", "--python", "/bin/true")
    _, err = await process.communicate()
    assert process.returncode == 2
    assert err == b"error: /bin/true is not a Python interpreter that runs\n"


async def test_a_program_that_is_not_there_is_an_os_error() -> None:
    with pytest.raises(OSError):
        await WorkerProcess(["/no/such/python"], {}, f"127.0.0.1:{free_port()}").start()


async def gone(pid: int) -> None:
    """Waits until the process has ended."""
    while state_of(pid) not in ("", "Z"):  # noqa: ASYNC110 - no event tells of another's end
        await asyncio.sleep(0.01)


def state_of(pid: int) -> str:
    """As in /proc: Z has ended and is not reaped yet, which is init's to do; "" is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
