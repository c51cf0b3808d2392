"""From options to a worker that serves, and to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from router.units import format_duration
from workers.vllm.command import command, environment
from workers.vllm.options import WorkerOptions
from workers.vllm.process import WorkerProcess


class LaunchFailed(RuntimeError):
    """The worker ended, or never came to serve; the message is one sentence."""


async def launch(options: WorkerOptions) -> None:
    """Runs the worker until SIGTERM or SIGINT, and prints `listening on …` when it serves.

    Raises LaunchFailed when it ends by itself or does not serve in time.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    worker = WorkerProcess(command(options), environment(options, os.environ), options.address)
    await worker.start()
    ended = asyncio.ensure_future(worker.ended())
    asked = asyncio.ensure_future(stopped.wait())
    serving = asyncio.ensure_future(worker.serving())
    try:
        await asyncio.wait(
            (serving, ended, asked),
            timeout=options.start_timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if asked.done():
            return
        if ended.done():
            raise LaunchFailed(f"vLLM ended before it served ({_told(ended.result())})")
        if not serving.done():
            limit = format_duration(options.start_timeout)
            raise LaunchFailed(f"vLLM did not serve within {limit} (--start-timeout)")
        serving.result()
        print(f"listening on {options.address}", flush=True)
        await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            raise LaunchFailed(f"vLLM ended by itself ({_told(ended.result())})")
    finally:
        serving.cancel()
        asked.cancel()
        code = await worker.stop(options.stop_timeout)
        _remove_socket(options.kv_events)
        await asyncio.gather(serving, asked, ended, return_exceptions=True)
        if stopped.is_set() and code == -signal.SIGKILL:
            limit = format_duration(options.stop_timeout)
            print(f"vLLM did not stop within {limit} and was killed", file=sys.stderr)


def _remove_socket(endpoint: str) -> None:
    # A worker that was killed leaves it behind.
    if endpoint.startswith("ipc://"):
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


def _told(code: int) -> str:
    if code < 0:
        return f"by signal {signal.Signals(-code).name}"
    return f"exit code {code}"
