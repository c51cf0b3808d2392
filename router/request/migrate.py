"""Going on elsewhere after a worker died in mid-stream (`--migration`).

The worker that takes over gets the prompt with the tokens that the client has
already, so the client sees one stream. That is the same stream only where
nothing but token ids decides what comes next, so requests with a grammar, a
seed, logprobs, several choices, stop strings or penalties on the output are
left out.
"""

from __future__ import annotations

from router.wire import engine

# Workers may count to any number.
_UINT32 = 2**32 - 1

_NOT_CONTINUABLE = ("seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")


def eligible(request: engine.GenerateRequest) -> bool:
    """Whether a request could be continued from its prompt and the tokens so far."""
    params = request.sampling_params
    return (
        request.stream
        and request.WhichOneof("input") == "tokenized"
        and params.n <= 1
        and params.WhichOneof("constraint") is None
        and not any(params.HasField(name) for name in _NOT_CONTINUABLE)
        and not params.stop
        and not params.frequency_penalty
        and not params.presence_penalty
        and not request.HasField("kv_transfer_params")
        and not request.HasField("kv_transfer_params_json")
    )


class Continuation:
    """One stream that may pass from worker to worker.

    Keeps the raw messages that went to the client, and reads them only if
    they are needed. `end_ids` are the tokens that end an answer of this model.
    """

    def __init__(self, end_ids: frozenset[int] = frozenset()) -> None:
        self._end_ids = end_ids
        self._kept: list[bytes] = []
        self._ids: list[int] = []
        self._prompt_tokens = 0
        # Whether workers count a stream's tokens from its start or from the last message.
        self._cumulative: bool | None = None

    @property
    def tokens(self) -> int:
        """Output tokens that came before the present attempt."""
        return len(self._ids)

    def keep(self, message: bytes) -> None:
        """Notes a message that the client gets."""
        self._kept.append(message)

    def resume(self, request: engine.GenerateRequest) -> int:
        """Turns a request, in place, into one for what is left; returns how many tokens it grew.

        `request` is the one that the attempt before was made from. Raises DecodeError when
        the client got bytes that are no message: nobody knows how to go on after those.
        """
        new = self._read()
        request.tokenized.input_ids.extend(new)
        params = request.sampling_params
        if params.HasField("max_tokens"):
            params.max_tokens = max(0, params.max_tokens - len(new))
        params.min_tokens = max(0, params.min_tokens - len(new))
        return len(new)

    def exhausted(self, request: engine.GenerateRequest) -> bool:
        """Whether a resumed request has nothing left to ask for: its answer is over."""
        params = request.sampling_params
        if params.HasField("max_tokens") and params.max_tokens == 0:
            return True
        # The token that ends an answer is part of it; only word of the end was lost.
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= self._end_ids
        return bool(self._ids) and not params.min_tokens and self._ids[-1] in ends

    def translate(self, message: bytes) -> bytes:
        """A message of a later worker, counted as though it were of the first."""
        if not self._ids:
            return message
        response = engine.GenerateResponse.FromString(message)
        earlier = len(self._ids)
        if response.HasField("chunk"):
            chunk = response.chunk
            if self._cumulative:
                chunk.completion_tokens = min(chunk.completion_tokens + earlier, _UINT32)
            self._recount(chunk)
        elif response.HasField("complete"):
            complete = response.complete
            if self._cumulative:
                complete.completion_tokens = min(complete.completion_tokens + earlier, _UINT32)
                complete.output_ids[:] = [*self._ids, *complete.output_ids]
            self._recount(complete)
        return response.SerializeToString()

    def _recount(self, part: engine.GenerateStreamChunk | engine.GenerateComplete) -> None:
        if part.prompt_tokens:
            part.prompt_tokens = self._prompt_tokens or max(0, part.prompt_tokens - len(self._ids))
        if self._prompt_tokens:
            part.cached_tokens = min(part.cached_tokens, self._prompt_tokens)

    def _read(self) -> list[int]:
        """The ids in the messages kept since the last break, moved to what came earlier."""
        new: list[int] = []
        for message in self._kept:
            chunk = engine.GenerateResponse.FromString(message).chunk
            new.extend(chunk.token_ids)
            self._prompt_tokens = self._prompt_tokens or chunk.prompt_tokens
            # The worker's own count begins with its own first message.
            if self._cumulative is None and len(chunk.token_ids) not in (0, len(new)):
                self._cumulative = chunk.completion_tokens == len(new)
        self._kept.clear()
        self._ids += new
        return new
