"""Chunks and Completes, in the manner of the Python servicer or of the Rust one.

In a stream the Python servicer's counts are those of the message alone and its
Complete repeats the last chunk's ids; the Rust servicer's counts and Complete
cover the whole choice. Without a stream both say everything once.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.wire import engine
from workers.sim import logprobs
from workers.sim.job import Job
from workers.sim.options import Style
from workers.sim.sampling import Sampling


@dataclass(frozen=True)
class Speech:
    """Words the progress of one job."""

    job: Job
    sampling: Sampling
    style: Style
    stream: bool

    def chunk(self, index: int, start: int, end: int) -> engine.GenerateResponse:
        """Tokens `start` to `end` of choice `index`."""
        job = self.job
        ids = job.outputs[index].ids[start:end]
        response = engine.GenerateResponse()
        chunk = response.chunk
        chunk.token_ids.extend(ids)
        chunk.prompt_tokens = job.prompt_tokens
        chunk.completion_tokens = len(ids) if self.style == "python" else start + len(ids)
        chunk.cached_tokens = job.cached_tokens
        chunk.index = index
        if self.sampling.logprobs is not None:
            chunk.output_logprobs.CopyFrom(logprobs.of_output(ids, start, self.sampling.logprobs))
        if self.sampling.prompt_logprobs is not None and start == 0:
            chunk.input_logprobs.CopyFrom(self._prompt_logprobs(self.sampling.prompt_logprobs))
        return response

    def complete(
        self, index: int, said: int, last: int, *, aborted: bool = False
    ) -> engine.GenerateResponse:
        """The end of choice `index` after `said` tokens, the last chunk having begun at `last`."""
        job = self.job
        output = job.outputs[index]
        partial = self.stream and self.style == "python"
        ids = output.ids[last if partial else 0 : said]
        response = engine.GenerateResponse()
        complete = response.complete
        complete.output_ids.extend(ids)
        complete.finish_reason = "abort" if aborted else output.finish_reason
        complete.prompt_tokens = job.prompt_tokens
        complete.completion_tokens = len(ids)
        complete.cached_tokens = job.cached_tokens
        complete.index = index
        if not aborted and output.matched_token is not None:
            complete.matched_token_id = output.matched_token
        if not aborted and output.matched_string is not None:
            complete.matched_stop_str = output.matched_string
        if not partial and self.sampling.logprobs is not None:
            complete.output_logprobs.CopyFrom(logprobs.of_output(ids, 0, self.sampling.logprobs))
        if not self.stream and self.sampling.prompt_logprobs is not None:
            complete.input_logprobs.CopyFrom(self._prompt_logprobs(self.sampling.prompt_logprobs))
        return response

    def _prompt_logprobs(self, wanted: int) -> engine.InputLogProbs:
        return logprobs.of_prompt(self.job.ids.tolist(), wanted)
