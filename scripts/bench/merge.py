"""What joining waiting chunks saves when a router is saturated, and costs when it is not.

Workers in processes of their own stream as fast as they are let; before them
two `mmrouter serve`, one with `--merge-chunks`, one without. Under saturation
many streams run at once, and what is compared is how many tokens pass for a
second of the router's CPU time. At rest one stream runs, paced, and each
message says when it was sent. The routers take turns in the same run.

    python scripts/bench/merge.py [--rounds 4] [--streams 32] [--tokens 512] [--workers 3]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import grpc
from relay import METHOD, OPTIONS, cpu_seconds, process, serve_bare, wait_serving

from router.wire import engine

_PACE = 0.01
_WRAP = 1 << 32


def _micros() -> int:
    return time.monotonic_ns() // 1000 % _WRAP


# -- The worker


async def generate(raw: bytes, context: grpc.aio.ServicerContext) -> None:
    """`min_tokens` asks for a pause between messages, which then say when they were sent."""
    request = engine.GenerateRequest.FromString(raw)
    tokens = request.sampling_params.max_tokens
    chunk = engine.GenerateStreamChunk(token_ids=[4711], prompt_tokens=64, completion_tokens=1)
    response = engine.GenerateResponse(chunk=chunk)
    same = response.SerializeToString()
    for _ in range(tokens):
        if request.sampling_params.min_tokens:
            await asyncio.sleep(_PACE)
            response.chunk.prompt_tokens = _micros()
            same = response.SerializeToString()
        await context.write(same)
    complete = engine.GenerateComplete(
        finish_reason="length", prompt_tokens=64, completion_tokens=1, output_ids=[4711]
    )
    await context.write(engine.GenerateResponse(complete=complete).SerializeToString())


# -- The client


@dataclass
class Seen:
    """What clients saw: tokens and messages that brought them; seconds on the way, if known."""

    tokens: int = 0
    messages: int = 0
    first: list[float] = field(default_factory=list)
    on_the_way: list[float] = field(default_factory=list)


async def stream(channel: grpc.aio.Channel, tokens: int, seen: Seen, *, paced: bool) -> None:
    """One stream to its end, read as it comes."""
    request = engine.GenerateRequest(
        request_id="bench",
        tokenized=engine.TokenizedInput(input_ids=range(64)),
        sampling_params=engine.SamplingParams(max_tokens=tokens, min_tokens=int(paced)),
        stream=True,
    )
    began, count, messages = time.monotonic(), 0, 0
    async for raw in channel.unary_stream(METHOD)(request.SerializeToString()):
        now = _micros()
        chunk = engine.GenerateResponse.FromString(raw).chunk
        if not chunk.token_ids:
            continue
        if paced:
            seen.on_the_way.append((now - chunk.prompt_tokens) % _WRAP / 1e6)
            if not messages:
                seen.first.append(time.monotonic() - began - _PACE)
        messages += 1
        count += len(chunk.token_ids)
    assert count == tokens, f"{count} of {tokens} tokens came"
    seen.tokens += count
    seen.messages += messages


async def streams(address: str, count: int, tokens: int, *, paced: bool = False) -> Seen:
    """`count` streams; all at once, or one after the other where they are paced."""
    seen = Seen()
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        if paced:
            for _ in range(count):
                await stream(channel, tokens, seen, paced=True)
        else:
            await asyncio.gather(
                *(stream(channel, tokens, seen, paced=False) for _ in range(count))
            )
    return seen


# -- The measurement


def measure(arguments: argparse.Namespace) -> None:
    serve = (sys.executable, "-m", "router", "serve", "--listen", "127.0.0.1:0", "--http", "")
    with ExitStack() as stack:
        start = stack.enter_context
        workers = [
            start(process(sys.executable, __file__, "--role", "worker"))[1]
            for _ in range(arguments.workers)
        ]
        fleet = [part for worker in workers for part in ("--worker", worker)]
        routers = {
            flag: start(process(*serve, *fleet, "--log-level", "warning", flag))
            for flag in ("--no-merge-chunks", "--merge-chunks")
        }
        for _, address in routers.values():
            asyncio.run(wait_serving(address))
            asyncio.run(streams(address, arguments.streams, 64))
        rates: dict[str, list[float]] = {flag: [] for flag in routers}
        sizes: dict[str, list[float]] = {flag: [] for flag in routers}
        idle: dict[str, Seen] = {flag: Seen() for flag in routers}
        for _ in range(arguments.rounds):
            for flag, (pid, address) in routers.items():
                before = cpu_seconds(pid)
                seen = asyncio.run(streams(address, arguments.streams, arguments.tokens))
                rates[flag].append(seen.tokens / (cpu_seconds(pid) - before))
                sizes[flag].append(seen.tokens / seen.messages)
            for flag, (_, address) in routers.items():
                seen = asyncio.run(streams(address, 3, 40, paced=True))
                idle[flag].first += seen.first
                idle[flag].on_the_way += seen.on_the_way
                idle[flag].tokens += seen.tokens
                idle[flag].messages += seen.messages
        report(rates, sizes, idle, arguments)


def report(
    rates: dict[str, list[float]],
    sizes: dict[str, list[float]],
    idle: dict[str, Seen],
    arguments: argparse.Namespace,
) -> None:
    print(f"saturated: {arguments.streams} streams of {arguments.tokens} tokens at once")
    for flag, rate in rates.items():
        print(
            f"  {flag:18} {statistics.median(rate):7.0f} tokens per CPU second, "
            f"{statistics.median(sizes[flag]):.1f} tokens a message"
        )
    off, on = rates.values()
    ratio = statistics.median(b / a for a, b in zip(off, on, strict=True))
    print(f"  joined against not: x{ratio:.2f} (median of {len(on)} rounds)")
    print(f"at rest: one stream, a message each {_PACE * 1000:.0f} ms")
    for flag, seen in idle.items():
        way = sorted(seen.on_the_way)
        print(
            f"  {flag:18} first message {statistics.median(seen.first) * 1e3:.2f} ms after the "
            f"request; worker to client {statistics.median(way) * 1e3:.2f} ms, "
            f"p95 {way[len(way) * 95 // 100] * 1e3:.2f} ms; "
            f"{seen.tokens / seen.messages:.2f} tokens a message"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--role", choices=("worker",), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        asyncio.run(serve_bare(generate))
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
