"""Real workers and routers as processes, shared by the tests of a session.

A worker takes half a minute to start and 2.8 GB, so each kind is started once,
when first asked for, and again only when a test has killed it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "real"
HOME = Path(
    os.environ.get("REAL_VLLM_HOME") or Path.home() / ".cache" / "mmrouter-real-vllm"
).absolute()
MODEL = HOME / "tiny-qwen3vl"
MODEL_NAME = "tiny-qwen3vl"

# When the tests themselves are killed, nothing stays behind. Not by a preexec_fn:
# gRPC's threads are no company for a fork without an exec.
SETPRIV = shutil.which("setpriv")
END_WITH_US = [SETPRIV, "--pdeathsig", "TERM", "--"] if SETPRIV else []

# On two busy cores three workers load at once for some minutes.
START_TIMEOUT = 420.0
# The first one of a tree compiles its kernels.
ROUTER_START_TIMEOUT = 240.0
STOP_TIMEOUT = 60.0

# What a worker is told: launcher's flags, then vLLM's.
KINDS: Mapping[str, tuple[str, ...]] = {
    # Takes references, wants raw pixels, reports its cache.
    "refs": ("--mm-processor", "inprocess", "--kv-events"),
    # Takes tensors only, wants raw pixels, reports its cache.
    "tensors": ("--mm-processor", "off", "--kv-events"),
    # Takes references, wants normalised floats.
    "floats": ("--mm-processor", "inprocess", "--", "--no-mm-device-do-normalize"),
}


class DidNotStart(RuntimeError):
    """A process ended, or said nothing in time; the message has the end of its log."""


@dataclass
class Process:
    """A process that says `listening on HOST:PORT`, in a group of its own."""

    popen: subprocess.Popen[str]
    address: str
    log: Path

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def stop(self) -> None:
        """Ends it in the way meant for it."""
        if self.alive:
            self.popen.terminate()
            try:
                self.popen.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                self.popen.kill()
        self.popen.wait()


@dataclass
class Worker(Process):
    """`mmrouter vllm`; the engine's processes are a session of their own below it."""

    def freeze(self) -> None:
        """Lets it answer nothing more, connections left open."""
        os.killpg(self._vllm(), signal.SIGSTOP)

    def kill(self) -> None:
        """Ends the process that serves, at once; its launcher clears up behind it."""
        vllm = self._vllm()
        os.kill(vllm, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(vllm, signal.SIGCONT)
        self.popen.wait(STOP_TIMEOUT)

    def _vllm(self) -> int:
        """vLLM's own process, which leads a group of its own."""
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text()
        (vllm,) = children.split()
        return int(vllm)


@dataclass
class Router(Process):
    """`mmrouter serve`."""

    http: str

    def ready(self) -> bool:
        """Whether it says that it can serve."""
        try:
            with urllib.request.urlopen(f"http://{self.http}/readyz", timeout=5):
                return True
        except OSError:
            return False

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels, as in the text format."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and line[0] != "#")
        return {name: float(value) for name, _, value in samples}

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of `name` that carry all of `labels`."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for sample, value in self.metrics().items()
            if sample.partition("{")[0] == name and all(label in sample for label in wanted)
        )


@dataclass
class Gateway(Process):
    """`smg launch`: an OpenAI-compatible gateway that speaks the worker wire."""

    http: str

    def get(self, path: str) -> Any:
        return self._json(urllib.request.Request(f"http://{self.http}{path}"))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer, parsed; raises HTTPError for a refusal."""
        headers = {"Content-Type": "application/json"}
        content = json.dumps(body).encode()
        return self._json(urllib.request.Request(f"http://{self.http}{path}", content, headers))

    def complaints(self) -> list[str]:
        """Its warnings and errors."""
        lines = re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text()).splitlines()
        return [line for line in lines if re.match(r"\S+ \S+\s+(WARN|ERROR) ", line)]

    def _json(self, request: urllib.request.Request) -> Any:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


class Stack:
    """What runs. `close` ends all of it."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._workers: dict[str, Worker] = {}
        self._routers: dict[tuple[str, ...], Router] = {}
        self._started = 0

    def workers(self, *kinds: str) -> list[Worker]:
        """Serving workers of these kinds; those that do not run are started side by side."""
        missing = [k for k in kinds if k not in self._workers or not self._workers[k].alive]
        pending = {kind: self._launch_worker(kind) for kind in missing}
        for kind, (popen, log) in pending.items():
            self._workers[kind] = Worker(popen, _address(popen, log, START_TIMEOUT), log)
        return [self._workers[kind] for kind in kinds]

    def worker(self, kind: str) -> Worker:
        (worker,) = self.workers(kind)
        return worker

    def router(self, *flags: str) -> Router:
        """A router with these flags, which has read its workers; one for each set of flags."""
        known = self._routers.get(flags)
        if known is not None and known.alive:
            return known
        http = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "router", "serve"]
        command += ["--listen", "127.0.0.1:0", "--http", http, *flags]
        popen, log = self._spawn("router", command, os.environ)
        router = Router(popen, _address(popen, log, ROUTER_START_TIMEOUT), log, http)
        self._routers[flags] = router
        _until_ready(router)
        return router

    def gateway(self, upstream: str, *flags: str) -> Gateway:
        """A gateway that has registered one gRPC address. The caller stops it."""
        port, metrics = free_port(), free_port()
        command = [str(HOME / "gateway" / "bin" / "smg"), "launch"]
        command += ["--worker-urls", f"grpc://{upstream}", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--prometheus-host", "127.0.0.1"]
        command += ["--prometheus-port", str(metrics), *flags]
        popen, log = self._spawn("gateway", command, os.environ)
        gateway = Gateway(popen, upstream, log, f"127.0.0.1:{port}")
        deadline = time.monotonic() + 120.0
        # It logs to stdout.
        threading.Thread(target=_copy, args=(popen, log), daemon=True).start()
        while "Successfully loaded tokenizer" not in log.read_text():
            if not gateway.alive or time.monotonic() > deadline:
                gateway.stop()
                raise DidNotStart(f"{log.name}\n" + log.read_text()[-3000:])
            time.sleep(0.1)
        return gateway

    def close(self) -> None:
        for process in (*self._routers.values(), *self._workers.values()):
            process.stop()

    def _launch_worker(self, kind: str) -> tuple[subprocess.Popen[str], Path]:
        command = [str(SCRIPTS / "worker.sh"), f"127.0.0.1:{free_port()}", *KINDS[kind]]
        env = os.environ | {"PYTHON": sys.executable, "REAL_VLLM_HOME": str(HOME)}
        return self._spawn(f"worker-{kind}", command, env)

    def _spawn(
        self, name: str, command: list[str], env: Mapping[str, str]
    ) -> tuple[subprocess.Popen[str], Path]:
        self._started += 1
        log = self._logs / f"{self._started:02}-{name}.log"
        with log.open("w") as out:
            popen = subprocess.Popen(
                [*END_WITH_US, *command],
                cwd=ROOT,
                env=dict(env),
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                start_new_session=True,
            )
        return popen, log


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _address(popen: subprocess.Popen[str], log: Path, timeout: float) -> str:
    """Waits for the line that tells the address; kills the process when it does not come."""
    assert popen.stdout is not None
    alarm = threading.Timer(timeout, popen.kill)
    alarm.start()
    try:
        for line in popen.stdout:
            if match := re.fullmatch(r"listening on (\S+)\n", line):
                return match[1]
    finally:
        alarm.cancel()
    popen.wait()
    raise DidNotStart(f"{log.name}: exit code {popen.returncode}\n" + log.read_text()[-3000:])


def _copy(popen: subprocess.Popen[str], log: Path) -> None:
    assert popen.stdout is not None
    with log.open("a") as out:
        for line in popen.stdout:
            out.write(line)
            out.flush()


def _until_ready(router: Router) -> None:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        if router.ready():
            return
        time.sleep(0.1)
    raise DidNotStart(f"{router.log.name} is not ready\n" + router.log.read_text()[-3000:])
