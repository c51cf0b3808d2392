"""One Generate inside the worker, from its prompt to its last Complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc
import numpy as np

from router.wire import engine
from workers.sim import constrained, handoff, output, sampling
from workers.sim.answer import compose
from workers.sim.bootstrap import Bootstrap, fetch
from workers.sim.faults import Trouble
from workers.sim.job import Job
from workers.sim.messages import Speech
from workers.sim.options import SimOptions
from workers.sim.prompt import Prompt, PromptReader
from workers.sim.refused import Refused, invalid
from workers.sim.scheduler import Scheduler, saturated
from workers.sim.stats import Stats
from workers.sim.tensors import EngineKilled

Send = Callable[[engine.GenerateResponse], Awaitable[None]]

CONSTRAINT_TRAILER = "smg-constraint-failed"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"


class Engine:
    """Runs requests, and stays dead once one has killed it."""

    def __init__(
        self,
        options: Callable[[], SimOptions],
        reader: PromptReader,
        scheduler: Scheduler,
        stats: Stats,
        bootstrap: Bootstrap,
    ) -> None:
        self._options = options
        self._reader = reader
        self._scheduler = scheduler
        self._stats = stats
        self._bootstrap = bootstrap
        self._jobs: dict[str, list[Job]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        # Why it no longer runs anything.
        self.dead: str | None = None

    @property
    def active(self) -> int:
        """Jobs that run or wait."""
        return sum(map(len, self._jobs.values()))

    def die(self, why: str) -> None:
        """Ends the engine for good, and every job in it."""
        self.dead = why
        for jobs in self._jobs.values():
            for job in jobs:
                job.kill()

    def abort(self, request_id: str) -> None:
        """Ends every job of that id, and what it handed over; unknown ids are no error."""
        for job in self._jobs.get(request_id, ()):
            job.abort()
        self._bootstrap.drop(request_id)

    async def idle(self, timeout: float) -> bool:
        """Whether no job is left, after waiting at most `timeout` seconds for it."""
        if timeout > 0 and not self._idle.is_set():
            try:
                async with asyncio.timeout(timeout):
                    await self._idle.wait()
            except TimeoutError:
                return False
        return self._idle.is_set()

    async def generate(self, request: engine.GenerateRequest, trouble: Trouble, send: Send) -> None:
        """Answers one request through `send`. Raises Refused where a worker fails the call."""
        self._refuse_at_once(request, trouble)
        options = self._options()
        transfer = handoff.read(request, options)
        if isinstance(transfer, handoff.Remote):
            transfer = await self._fetch(request, transfer, send)
            if transfer is None:
                return
        prompt = await self._read(request, transfer)
        wanted = sampling.read(request.sampling_params, len(prompt.ids), options.max_context)
        job = Job(
            request.request_id,
            prompt.ids,
            prompt.placed,
            [
                _choice(prompt, wanted, request.sampling_params, index)
                for index in range(wanted.choices)
            ],
            prefilled=isinstance(transfer, handoff.Incoming),
        )
        speech = Speech(job, wanted, options.style, request.stream)
        if isinstance(transfer, handoff.Outgoing):
            send = self._with_handoff(send, request, prompt, transfer)
        self._enter(job)
        try:
            await self._scheduler.admit(job)
            await self._scheduler.prefill(job)
            await job.pause(trouble.slow_first)
            await self._speak(speech, trouble, send)
        finally:
            self._scheduler.release(job)
            self._leave(job)

    def _refuse_at_once(self, request: engine.GenerateRequest, trouble: Trouble) -> None:
        pushback: tuple[tuple[str, str], ...] = ()
        if trouble.pushback_ms is not None:
            pushback = ((PUSHBACK_TRAILER, str(trouble.pushback_ms)),)
        if trouble.die:
            self.die("as was asked for")
        self._check_alive()
        if trouble.saturate:
            refused = saturated(self._scheduler.running, self._scheduler.waiting)
            raise Refused(refused.status, refused.message, pushback)
        if trouble.fail is not None:
            raise Refused(trouble.fail, "This call fails as was asked for.", pushback)
        if trouble.constraint_failed is not None:
            raise Refused(
                trouble.constraint_failed,
                "The worker no longer meets what it advertised.",
                ((CONSTRAINT_TRAILER, "1"), *pushback),
            )
        if self._options().style == "rust" and self._jobs.get(request.request_id):
            raise Refused(
                grpc.StatusCode.ALREADY_EXISTS,
                f"a request with id {request.request_id!r} is running",
            )
        self._scheduler.check_queue()

    async def _fetch(
        self, request: engine.GenerateRequest, remote: handoff.Remote, send: Send
    ) -> handoff.Incoming | None:
        """Waits for the cache of a prefill elsewhere; None when the request was aborted meanwhile.

        It can be aborted while it waits, like any other request.
        """
        waiting = Job(request.request_id, np.empty(0, np.uint32), (), ())
        fetching = asyncio.create_task(fetch(remote, self._options().transfer_timeout))
        fetching.add_done_callback(lambda _: waiting.wake())
        self._enter(waiting)
        try:
            await waiting.pause(None)
            if not waiting.ended:
                return await fetching
        finally:
            self._leave(waiting)
            fetching.cancel()
        self._check_alive()
        self._stats.aborted += 1
        for index in range(max(1, request.sampling_params.n)):
            complete = engine.GenerateComplete(index=index, finish_reason="abort")
            await send(engine.GenerateResponse(complete=complete))
        return None

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise Refused(grpc.StatusCode.INTERNAL, f"The engine has died: {self.dead}.")

    async def _read(
        self, request: engine.GenerateRequest, transfer: handoff.Handoff | None
    ) -> Prompt:
        incoming = transfer if isinstance(transfer, handoff.Incoming) else None
        try:
            prompt = await self._reader.read(request, incoming.sights if incoming else None)
            self._check_length(len(prompt.ids))
        except EngineKilled as killed:
            if not self._options().mortal:
                raise invalid(f"This would kill a real engine: {killed}.") from killed
            self.die(str(killed))
        self._check_alive()
        if incoming and not self._options().gullible:
            _check_prompt(prompt, incoming)
        return prompt

    def _check_length(self, tokens: int) -> None:
        options = self._options()
        if tokens < options.max_context:
            return
        message = (
            f"the prompt has {tokens} tokens; with at least one of output it exceeds "
            f"the context of {options.max_context}"
        )
        if options.style == "rust":
            raise EngineKilled(message)
        raise invalid(message)

    def _enter(self, job: Job) -> None:
        self._jobs.setdefault(job.request_id, []).append(job)
        self._idle.clear()

    def _leave(self, job: Job) -> None:
        jobs = self._jobs[job.request_id]
        jobs.remove(job)
        if not jobs:
            del self._jobs[job.request_id]
        if not self._jobs:
            self._idle.set()

    def _with_handoff(
        self,
        send: Send,
        request: engine.GenerateRequest,
        prompt: Prompt,
        transfer: handoff.Outgoing,
    ) -> Send:
        """`send`, with what a decode worker needs in every Complete, or at the bootstrap."""

        async def filled(response: engine.GenerateResponse) -> None:
            complete = response.complete
            if response.HasField("complete"):
                handoff.fill(complete, request, prompt, self._options())
                if transfer.transfer_id and complete.finish_reason == "length":
                    await self._bootstrap.post(transfer.transfer_id, request.request_id, prompt)
            await send(response)

        return filled

    async def _speak(self, speech: Speech, trouble: Trouble, send: Send) -> None:
        """Sends the choices step by step, all of them in turn."""
        options, job, outputs = self._options(), speech.job, speech.job.outputs
        delay = options.time_per_output_token
        longest = max(len(choice.ids) for choice in outputs)
        # Nobody sees the steps of an answer that comes at once and in one piece.
        at_once = not speech.stream and not delay
        step = longest if at_once else options.tokens_per_chunk
        due, chunks = time.monotonic(), 0
        for start in range(0, longest, step):
            end = start + step
            if delay:
                due += delay * step
                await job.pause(due - time.monotonic())
            for index, choice in enumerate(outputs):
                if start >= len(choice.ids):
                    continue
                await self._meet(job, trouble, chunks)
                if job.ended:
                    break
                said = min(end, len(choice.ids))
                if speech.stream:
                    await send(speech.chunk(index, start, said))
                chunks += 1
                self._scheduler.produced(said - start)
                self._stats.tokens += said - start
                if said == len(choice.ids):
                    await self._meet(job, trouble, chunks)
                    if job.ended:
                        break
                    if not trouble.end_without_complete:
                        await send(speech.complete(index, said, start))
            if job.ended:
                await self._end_early(speech, start, send)
                return
            self._scheduler.grow(job, outputs[0].ids, min(end, len(outputs[0].ids)), start)

    async def _meet(self, job: Job, trouble: Trouble, chunks: int) -> None:
        """What the trouble wants at this point of the stream."""
        if trouble.fail_after_chunks is not None and chunks >= trouble.fail_after_chunks:
            raise Refused(trouble.break_status, "The stream breaks as was asked for.")
        if trouble.hang_after_chunks is not None and chunks >= trouble.hang_after_chunks:
            await job.pause(None)

    async def _end_early(self, speech: Speech, start: int, send: Send) -> None:
        self._check_alive()
        self._stats.aborted += 1
        for index, choice in enumerate(speech.job.outputs):
            if start < len(choice.ids):
                await send(speech.complete(index, start, start, aborted=True))


def _choice(
    prompt: Prompt, wanted: sampling.Sampling, params: engine.SamplingParams, index: int
) -> output.Output:
    if prompt.adrift:
        return output.drift(wanted.rules)
    sentence = compose(prompt.ids, prompt.seen, draw=wanted.draw(index))
    return output.write(constrained.shape(sentence, params), wanted.rules)


def _check_prompt(prompt: Prompt, incoming: handoff.Incoming) -> None:
    if handoff.digest(prompt.ids) != incoming.prompt:
        raise Refused(grpc.StatusCode.INTERNAL, "the transferred cache is of another prompt")
