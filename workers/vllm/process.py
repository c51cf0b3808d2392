"""The worker's process: started, waited for until it serves, stopped with all its children."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

import grpc
from grpc_health.v1 import health_pb2

POLL_INTERVAL = 0.2
CHECK_TIMEOUT = 2.0
CHILDREN_TIMEOUT = 10.0


class WorkerProcess:
    """One `vllm serve`, in a session of its own so that its engine processes end with it.

    What it prints goes to our stderr; stdout is the launcher's.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], address: str) -> None:
        self._argv = argv
        self._env = env
        self._address = address
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts it; returns at once. Raises OSError when there is no such program."""
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, env=self._env, stdout=sys.stderr, start_new_session=True
        )

    async def serving(self) -> None:
        """Returns when health is SERVING; the engine's warm-up is over then."""
        # A proxy from the environment is for what the worker fetches.
        options = (("grpc.enable_http_proxy", 0),)
        async with grpc.aio.insecure_channel(self._address, options) as channel:
            check: grpc.aio.UnaryUnaryMultiCallable[
                health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
            ] = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            while True:
                try:
                    answer = await check(health_pb2.HealthCheckRequest(), timeout=CHECK_TIMEOUT)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.aio.AioRpcError:
                    pass  # not yet: it loads the model before it listens
                await asyncio.sleep(POLL_INTERVAL)

    async def ended(self) -> int:
        """Its exit code, once it has ended; negative is the signal that ended it."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, timeout: float) -> int:
        """Asks it to end, after `timeout` seconds makes it; returns its exit code.

        vLLM answers SIGTERM by finishing open calls for some seconds. Its
        engine processes are asked after that, if they are left, and get a
        moment of their own: what they leave in /dev/shm when they are killed,
        hundreds of MB, nobody removes.
        """
        process = self._process
        assert process is not None
        try:
            async with asyncio.timeout(timeout):
                if process.returncode is None:
                    process.send_signal(signal.SIGTERM)
                await process.wait()
            async with asyncio.timeout(CHILDREN_TIMEOUT):
                self._signal_group(signal.SIGTERM)
                while self._signal_group(0):  # noqa: ASYNC110 - they are not our children
                    await asyncio.sleep(POLL_INTERVAL)
        except TimeoutError:
            pass
        finally:
            self._signal_group(signal.SIGKILL)
        return await process.wait()

    def _signal_group(self, number: int) -> bool:
        """Signals all that is left of it; 0 only asks whether something is."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


def free_port() -> int:
    """A TCP port of loopback that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
