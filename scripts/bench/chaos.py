"""Whether anything is lost or left over while workers die, freeze, change and flap.

Simulated workers, a process each, behind one router that finds them in a
file. Clients send text and pictures all the while; for a minute workers are
killed with SIGKILL and come back, some with other capabilities, are frozen
with SIGSTOP, vanish from the file and return, and the file itself is garbled.
Then all is mended, and what the router holds is compared with what it held
before.

What has to hold: every call has one outcome, and the router counted the same;
calls fail only when they had begun at a worker that was killed (with
--migration not even those, where a stream may be continued); no lease, task or
descriptor is left, and memory is flat.

    python scripts/bench/chaos.py [--seconds 60] [--workers 6] [--clients 12] [--migration]

Exit code 0 when all of it held. Everything runs on loopback and stops by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).parent))
from chaos_fleet import Fleet, Kill, Router, serve

from router.request.migrate import eligible
from router.wire import common, engine
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub

# The wire form of a prompt with one picture, in the simulator's byte tokens.
_BEFORE, _ANCHOR, _AFTER = 151652, 151655, 151653
_CALL_TIMEOUT = 60.0
# Allocator's noise of a router under load, in bytes.
_FLAT = 40 << 20


@dataclass
class Outcome:
    """One call's one end. `status` is OK, CANCELLED (by the client) or the error's reason."""

    kind: str
    status: str
    begun: bool
    continuable: bool
    worker: str
    began: float
    ended: float

    def excused_by(self, kills: list[Kill], migration: bool) -> bool:
        """Whether a kill explains the failure, and nothing should have undone it."""
        hit = any(k.address in self.worker and self.began <= k.at <= self.ended for k in kills)
        return self.begun and hit and not (migration and self.continuable)


@dataclass
class Clients:
    """Callers that ask, one after the other, until they are told to stop."""

    stub: Any
    rng: random.Random
    pictures: list[str]
    outcomes: list[Outcome] = field(default_factory=list)
    stopping: bool = False

    async def run(self, count: int, seconds: float) -> None:
        async with asyncio.timeout(seconds + 2 * _CALL_TIMEOUT), asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._ask())

    async def load(self, count: int, seconds: float) -> None:
        """Asks for so many seconds, in calm."""
        self.stopping = False
        task = asyncio.create_task(self.run(count, seconds))
        await asyncio.sleep(seconds)
        self.stopping = True
        await task

    async def _ask(self) -> None:
        while not self.stopping:
            self.outcomes.append(await self._call())

    async def _call(self) -> Outcome:
        kind, request = self._request()
        leaves = self.rng.random() < 0.05
        call = self.stub.Generate(request, timeout=_CALL_TIMEOUT)
        began, messages, completes, status = time.monotonic(), 0, 0, "OK"
        try:
            async for response in call:
                messages += 1
                completes += response.HasField("complete")
                if leaves:
                    call.cancel()
            status = "OK" if completes == 1 else f"{completes} COMPLETES"
        except asyncio.CancelledError:
            status = "CANCELLED"
        except grpc.aio.AioRpcError as error:
            status = f"{error.code().name}: {error.details()}"
        trailers = {} if status == "CANCELLED" else dict(await call.trailing_metadata() or ())
        return Outcome(
            kind=kind,
            status=status,
            begun=messages > 0,
            continuable=eligible(request),
            worker=str(trailers.get("mmrouter-worker", "")),
            began=began,
            ended=time.monotonic(),
        )

    def _request(self) -> tuple[str, engine.GenerateRequest]:
        words = [self.rng.randrange(97, 123) for _ in range(self.rng.randrange(8, 200))]
        streamed = self.rng.random() < 0.7
        request = engine.GenerateRequest(
            stream=streamed, sampling_params=engine.SamplingParams(max_tokens=80)
        )
        if self.rng.random() < 0.4:
            words += [_BEFORE, _ANCHOR, _AFTER]
            url = self.rng.choice(self.pictures)
            request.media_refs.items.add(modality=common.IMAGE, url=url)
        request.tokenized.input_ids.extend(words)
        kind = "picture" if request.HasField("media_refs") else "text"
        return kind + (" stream" if streamed else ""), request


def pictures(rng: random.Random, count: int = 12) -> list[str]:
    """Small pictures of different size, as data: URLs."""
    import numpy as np
    from PIL import Image

    made = []
    for _ in range(count):
        size = rng.randrange(64, 400), rng.randrange(64, 400), 3
        pixels = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, size, np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        made.append(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}")
    return made


async def settled(router: Router, workers: int) -> dict[str, Any]:
    """What the router holds when every worker is ready and no request is left.

    Of several moments the one with the fewest tasks: a probe's question that is
    under way at one moment is not there at all of them, what leaked is.
    """
    calm: list[dict[str, Any]] = []
    async with asyncio.timeout(120):
        while len(calm) < 12:
            held = await router.held()
            at_work = any(held[k] for k in ("leases", "requests", "attempts", "places"))
            if not at_work and held["ready"] == held["workers"] == workers:
                calm.append(held)
            await asyncio.sleep(0.25)
    return min(calm, key=lambda held: (held["tasks"], len(held["descriptors"])))


@dataclass
class Verdict:
    """One line for each thing that has to hold."""

    failed: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        print(f"  {'ok ' if holds else 'NOT'}  {what}")
        if not holds:
            self.failed.append(what)


async def run(options: argparse.Namespace) -> int:
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="mmrouter-chaos-") as name:
        folder = Path(name)
        fleet = Fleet(options.workers, folder, rng)
        settings = {
            "listen": "127.0.0.1:0",
            "http": "",
            "discovery": "file",
            "discovery_file": str(fleet.file),
            "discovery_interval": "100ms",
            "health_interval": "500ms",
            "load_interval": "500ms",
            "drain_timeout": "20s",
            "policy": "least_load",
            "migration": str(options.migration).lower(),
        }
        given = [f"{key}={value}" for key, value in settings.items()]
        log = folder / "router.log"
        router = Router(__file__, "--as-router", *given, log=log)
        try:
            await fleet.start()
            address = await router.launch()
            async with grpc.aio.insecure_channel(address) as channel:
                clients = Clients(VllmEngineStub(channel), rng, pictures(rng))
                code = await _measure(options, fleet, router, clients)
            # The router has to end by itself, and in order.
            ended = await router.end()
            print(f"  {'ok ' if ended == 0 else 'NOT'}  the router ended with {ended}")
            if options.keep_log:
                shutil.copyfile(log, options.keep_log)
            return code or int(ended != 0)
        finally:
            if router.process is not None:
                await router.end()
            await fleet.stop()


async def _measure(
    options: argparse.Namespace, fleet: Fleet, router: Router, clients: Clients
) -> int:
    await settled(router, options.workers)
    # Caches, pools and kernels come into being before anything is compared.
    await clients.load(options.clients, options.warm)
    before = await settled(router, options.workers)
    warm = len(clients.outcomes)
    clients.stopping = False
    asking = asyncio.create_task(clients.run(options.clients, options.seconds + 180))
    began = time.monotonic()
    await fleet.trouble(options.seconds, options.pause)
    clients.stopping = True
    await asking
    seconds = time.monotonic() - began
    after = await settled(router, options.workers)
    return report(clients.outcomes, warm, before, after, fleet, options.migration, seconds)


def report(
    outcomes: list[Outcome],
    warm: int,
    before: dict[str, Any],
    after: dict[str, Any],
    fleet: Fleet,
    migration: bool,
    seconds: float,
) -> int:
    """Prints the figures; 0 when everything held."""
    chaotic = outcomes[warm:]
    failed = [o for o in outcomes if o.status not in ("OK", "CANCELLED")]
    excused = [o for o in failed if o.excused_by(fleet.kills, migration)]
    print(
        f"\n{seconds:.0f} s of trouble: {_listed(fleet.counts)}; {len(fleet.kills)} killed in all"
    )
    print(f"{len(chaotic)} calls: {_listed(Counter(o.kind for o in chaotic))}")
    ends = Counter(o.status.partition(":")[0] for o in chaotic)
    slowest = max((o.ended - o.began for o in chaotic), default=0.0)
    print(f"ends: {_listed(ends)}; the slowest took {slowest:.1f} s")
    print(f"the router counted {_listed(after['outcomes'])}")
    print(f"tasks: {before['tasks']} before, {after['tasks']} after")
    held = [len(state["descriptors"]) for state in (before, after)]
    print(f"descriptors: {held[0]} before, {held[1]} after")
    more = Counter(after["descriptors"]) - Counter(before["descriptors"])
    if more:
        print(f"  new among them: {_listed(more)}")
    grown = after["resident"] - before["resident"]
    print(f"memory: {before['resident'] >> 20} MiB before, {grown / 2**20:+.1f} MiB\n")

    verdict = Verdict()
    counted = sum(after["outcomes"].values())
    verdict.check(
        counted == len(outcomes), f"{len(outcomes)} calls, {counted:.0f} outcomes counted"
    )
    verdict.check(
        len(failed) == len(excused),
        f"{len(failed)} failures, {len(excused)} of streams that had begun at a killed worker",
    )
    for one in failed:
        if one not in excused:
            print(f"         {one.kind} at {one.worker or 'no worker'}: {one.status[:150]}")
    verdict.check(after["leases"] == after["reserved"] == 0, "no lease is left")
    verdict.check(after["tasks"] <= before["tasks"], "no task is left")
    verdict.check(held[1] <= held[0], "no descriptor is left")
    verdict.check(grown < _FLAT, "memory is flat")
    return int(bool(verdict.failed))


def _listed(counts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in sorted(counts.items())) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm", type=float, default=8.0, help="seconds of calm load before")
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between troubles")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--migration", action="store_true")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--keep-log", metavar="FILE", help="keep the router's log")
    parser.add_argument("--as-router", nargs="+", metavar="NAME=VALUE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_router:
        asyncio.run(serve(options.as_router))
        return 0
    return asyncio.run(run(options))


if __name__ == "__main__":
    raise SystemExit(main())
