"""Generate on prompts of plain text: what is said, how it ends, and how it is worded."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from router.wire import engine
from tests.serving import eventually
from tests.workers.sim.client import chunk_ids, client_of, completes, prompt, streamed
from workers.sim import SimOptions
from workers.sim.tokenizer import IM_END, VOCAB_SIZE, decode, encode

CHAT = "<|im_start|>user\nWhat colour is the sky<|im_end|>\n<|im_start|>assistant\n"


async def test_the_answer_says_how_much_arrived_and_how_it_ended() -> None:
    async with client_of() as client:
        text = await client.say(prompt(CHAT))
    assert text.startswith(f"I read {len(encode(CHAT))} prompt tokens.")
    assert text.endswith('ends "What colour is the sky".')


async def test_different_prompts_get_different_answers_and_the_same_prompt_the_same() -> None:
    async with client_of() as client:
        first, again, other = [await client.say(prompt(t)) for t in ("aa bb", "aa bb", "ab bb")]
    assert first == again != other


async def test_a_stream_gives_one_token_a_chunk_then_one_complete() -> None:
    async with client_of() as client:
        whole = await client.generate(prompt(CHAT))
        parts = await client.generate(streamed(CHAT))
    ids = list(whole[0].complete.output_ids)
    assert ids[-1] == IM_END
    assert chunk_ids(parts) == ids
    assert [r.WhichOneof("response") for r in parts] == ["chunk"] * len(ids) + ["complete"]
    assert parts[-1].complete.finish_reason == "stop"


async def test_the_python_style_counts_each_message_by_itself() -> None:
    async with client_of(SimOptions(tokens_per_chunk=4)) as client:
        parts = await client.generate(streamed("x", max_tokens=10))
    assert [p.chunk.completion_tokens for p in parts[:-1]] == [4, 4, 2]
    assert list(parts[-1].complete.output_ids) == list(parts[-2].chunk.token_ids)
    assert parts[-1].complete.completion_tokens == 2
    assert parts[-1].complete.finish_reason == "length"


async def test_the_rust_style_counts_from_the_beginning() -> None:
    async with client_of(SimOptions(style="rust", tokens_per_chunk=4)) as client:
        parts = await client.generate(streamed("x", max_tokens=10))
    assert [p.chunk.completion_tokens for p in parts[:-1]] == [4, 8, 10]
    assert list(parts[-1].complete.output_ids) == chunk_ids(parts)
    assert parts[-1].complete.completion_tokens == 10


async def test_the_same_id_twice_at_once_is_refused_in_the_rust_style_alone() -> None:
    for style, refused in (("python", False), ("rust", True)):
        async with client_of(SimOptions(style=style)) as client:  # type: ignore[arg-type]
            first = client.stub.Generate(streamed("[[sim: hang-after-chunks=1]]"))
            await first.read()
            if refused:
                error = await client.refusal(prompt("second"))
                assert error.code() is grpc.StatusCode.ALREADY_EXISTS
            else:
                assert await client.say(prompt("second"))
            first.cancel()


async def test_each_choice_has_its_own_chunks_and_its_own_complete() -> None:
    async with client_of() as client:
        parts = await client.generate(streamed("x", n=3, max_tokens=5))
    assert sorted(c.index for c in completes(parts)) == [0, 1, 2]
    assert [p.chunk.index for p in parts[:6]] == [0, 1, 2, 0, 1, 2]
    assert chunk_ids(parts, 0) == chunk_ids(parts, 1) == chunk_ids(parts, 2)


async def test_a_temperature_makes_choices_differ_and_a_seed_makes_them_repeat() -> None:
    async with client_of() as client:
        first = await client.generate(prompt("x", n=2, temperature=1.0, seed=7))
        again = await client.generate(prompt("x", n=2, temperature=1.0, seed=7))
        other = await client.generate(prompt("x", n=2, temperature=1.0, seed=8))
    ids = [list(r.complete.output_ids) for r in first]
    assert ids[0] != ids[1]
    assert ids == [list(r.complete.output_ids) for r in again]
    assert ids != [list(r.complete.output_ids) for r in other]


async def test_max_tokens_cuts_and_an_ignored_end_goes_on_to_it() -> None:
    async with client_of() as client:
        (short,) = await client.generate(prompt("x", max_tokens=5))
        (long,) = await client.generate(prompt("x", max_tokens=500, ignore_eos=True))
    assert (len(short.complete.output_ids), short.complete.finish_reason) == (5, "length")
    assert (len(long.complete.output_ids), long.complete.finish_reason) == (500, "length")
    assert IM_END in long.complete.output_ids


async def test_min_tokens_holds_the_end_back() -> None:
    async with client_of() as client:
        (response,) = await client.generate(prompt("x", min_tokens=300, max_tokens=400))
    ids = list(response.complete.output_ids)
    assert len(ids) == 301
    assert ids.index(IM_END) == 300


async def test_a_stop_string_ends_the_answer_and_stays_in_it() -> None:
    async with client_of() as client:
        (response,) = await client.generate(prompt("x", stop=["never", " prompt"]))
    complete = response.complete
    assert decode(complete.output_ids) == "I read 1 prompt"
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", " prompt")


async def test_a_stop_token_ends_the_answer_and_stays_in_it() -> None:
    async with client_of() as client:
        (response,) = await client.generate(prompt("x", stop_token_ids=[ord("d")]))
    complete = response.complete
    assert decode(complete.output_ids) == "I read"
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", ord("d"))


async def test_the_end_token_is_no_matched_stop() -> None:
    async with client_of() as client:
        (response,) = await client.generate(prompt("x"))
    assert response.complete.WhichOneof("matched_stop") is None


async def test_logprobs_come_with_every_token_and_are_the_same_in_every_run() -> None:
    async with client_of() as client:
        request = streamed("xyz", logprobs=3, prompt_logprobs=2, max_tokens=4)
        parts = await client.generate(request)
        assert parts == await client.generate(request)
    first = parts[0].chunk
    assert list(first.output_logprobs.token_ids) == list(first.token_ids)
    top = first.output_logprobs.top_logprobs[0]
    assert len(top.values) == 3
    assert top.token_ids[0] == first.token_ids[0]
    assert list(top.values) == sorted(top.values, reverse=True)
    assert [v.HasField("value") for v in first.input_logprobs.token_logprobs] == [False, True, True]
    assert not parts[1].chunk.HasField("input_logprobs")


async def test_a_text_prompt_is_tokenized_by_the_worker() -> None:
    async with client_of() as client:
        request = engine.GenerateRequest(request_id="r", text=CHAT)
        assert await client.say(request) == await client.say(prompt(CHAT))


async def test_a_prompt_is_truncated_to_its_last_tokens() -> None:
    async with client_of() as client:
        text = await client.say(prompt("one two three", truncate_prompt_tokens=5))
    assert text.startswith("I read 5 prompt tokens.")
    assert 'ends "three"' in text


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (engine.GenerateRequest(request_id="r"), "no prompt"),
        (prompt(""), "empty"),
        (prompt("x", max_tokens=0), "max_tokens"),
        (prompt("x", max_tokens=3, min_tokens=4), "min_tokens"),
        (prompt("x", temperature=-1.0), "temperature"),
        (prompt("x", logprobs=-2), "logprobs"),
        (prompt("x", n=1000), "n must"),
        (prompt("x" * 100), "100 tokens"),
        (
            engine.GenerateRequest(tokenized=engine.TokenizedInput(input_ids=[VOCAB_SIZE])),
            "vocabulary",
        ),
    ],
)
async def test_requests_that_mean_nothing_are_the_clients_fault(
    request_: engine.GenerateRequest, names: str
) -> None:
    async with client_of(SimOptions(max_context=100)) as client:
        error = await client.refusal(request_)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert names in (error.details() or "")


async def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    async with client_of(SimOptions(max_context=100)) as client:
        (response,) = await client.generate(prompt("x" * 60, ignore_eos=True))
    assert len(response.complete.output_ids) == 40


async def test_an_abort_ends_the_stream_with_ok() -> None:
    async with client_of() as client:
        call = client.stub.Generate(streamed("[[sim: hang-after-chunks=2]]", "me"))
        stream = aiter(call)
        received = [await anext(stream), await anext(stream)]
        await client.stub.Abort(engine.AbortRequest(request_ids=["unknown", "me"]))
        received += [response async for response in stream]
        assert await call.code() is grpc.StatusCode.OK
        assert client.worker.stats.aborted == 1
    assert len(chunk_ids(received)) == 2
    assert [c.finish_reason for c in completes(received)] == ["abort"]


async def test_a_cancelled_call_frees_its_place() -> None:
    async with client_of(SimOptions(max_num_seqs=1)) as client:
        call = client.stub.Generate(streamed("[[sim: hang-after-chunks=1]]"))
        await call.read()
        assert client.worker.scheduler.running == 1
        waiting = asyncio.create_task(client.say(prompt("next")))
        call.cancel()
        # It runs because the place was given back, not because time passed.
        assert await waiting
        stats, scheduler = client.worker.stats, client.worker.scheduler
        await eventually(lambda: (stats.cancelled, stats.live, scheduler.running) == (1, 0, 0))
