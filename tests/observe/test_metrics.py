import asyncio
import math
import shutil
import subprocess

import aiohttp
import grpc
import numpy as np
import pytest
from prometheus_client import Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain_text

from router.fleet.breaker import CallResult
from router.observe.metrics import Metrics
from router.observe.snapshot import Source
from router.prefix.changes import Stored
from router.prefix.events import EventReader
from router.prefix.gauges import prefix_gauges
from router.prefix.index import PrefixIndex
from router.prefix.learn import Learner
from router.rpc.errors import TABLE
from tests.serving import (
    MODEL,
    PICTURE,
    Serving,
    data_url,
    eventually,
    seeing,
    serving,
    streamed,
    tokenized,
)
from workers.sim import SimOptions

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
OUTCOMES = {
    *("ok", "client_cancelled", "client_fault", "overloaded", "unavailable"),
    *("worker_failed", "internal"),
}


async def scrape(served: Serving, accept: str = "text/plain") -> str:
    async with aiohttp.ClientSession() as session:
        url = f"http://{served.app.http}/metrics"
        async with session.get(url, headers={"Accept": accept}) as answer:
            assert answer.status == 200
            return await answer.text()


async def busy(served: Serving) -> None:
    """A bit of everything."""
    await served.generate(streamed("hello", max_tokens=4))
    await served.generate(seeing(f"{PICTURE} what?", data_url("rgba_203x151.png"), max_tokens=2))
    await served.generate(seeing(f"{PICTURE} what?", data_url("rgba_203x151.png"), max_tokens=2))
    await served.refusal(tokenized("who?", max_tokens=1), [("x-model", "nobody's")])
    await served.refusal(seeing(f"{PICTURE} what?", "data:image/png;base64,AAAA"))
    await served.at_rest()


async def test_an_accept_header_that_cannot_be_read_asks_for_nothing() -> None:
    body, content_type = await Metrics().render("application/openmetrics-text;version=x")
    assert content_type.startswith("text/plain")
    assert b"router_build_info" in body


@pytest.fixture(params=["text/plain", OPENMETRICS])
def accept(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_scrape_can_be_read_and_every_name_is_ours_or_the_process_s(accept: str) -> None:
    async with serving(SimOptions(), http="127.0.0.1:0", mm_processing="router") as served:
        await busy(served)
        text = await scrape(served, accept)
    families = list((openmetrics if "openmetrics" in accept else plain_text)(text))
    assert text.endswith("# EOF\n") == ("openmetrics" in accept)
    names = [family.name for family in families]
    assert len(names) == len(set(names)) > 50
    assert all(name.startswith(("router_", "process_", "python_")) for name in names)
    assert all(family.documentation for family in families)


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (Debian: prometheus) is missing")
async def test_promtool_finds_nothing_to_complain_about() -> None:
    async with serving(
        SimOptions(), SimOptions(), http="127.0.0.1:0", mm_processing="router"
    ) as served:
        await busy(served)
        text = await scrape(served)
    checked = await asyncio.to_thread(
        subprocess.run,
        ["promtool", "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


async def test_what_a_request_leaves_behind() -> None:
    async with serving(SimOptions(), http="127.0.0.1:0", mm_processing="router") as served:
        await busy(served)
        assert served.outcomes() == {
            ("ok", ""): 3,
            ("client_fault", "model_not_found"): 1,
            ("client_fault", "media_format_unsupported"): 1,
        }
        address = served.workers[0].address
        assert served.metric("router_attempts_total", worker=address, result="ok") == 3
        assert served.metric("router_selections_total", policy="round_robin", leg="single") == 3
        assert served.metric("router_first_output_seconds_count", model=MODEL) == 3
        assert served.metric("router_request_seconds_count", model=MODEL) == 4
        assert served.metric("router_output_tokens_total", model=MODEL) == 8
        told = served.metric("router_prompt_tokens_total", model=MODEL)
        # Counted with the pictures expanded, as the worker counts.
        assert told == served.metric("router_expected_prompt_tokens_total", model=MODEL) > 70
        assert served.metric("router_requests_in_flight") == 0
        assert served.metric("router_retry_budget_tokens") == 40
        assert served.metric("router_requests_at_work_limit") == 1024
        # The third picture is not one; the second is the first again.
        assert served.metric("router_media_fetch_seconds_count") == 3
        for stage, times in (("sniff", 2), ("hash", 2), ("decode", 1), ("pack", 1)):
            assert served.metric("router_media_stage_seconds_count", stage=stage) == times, stage
        assert served.metric("router_media_pixels_total", modality="image") == 203 * 151
        hits = {"cache": "content", "result": "hit"}
        assert served.metric("router_media_cache_requests_total", **hits) == 1
        assert served.metric("router_media_budget_used_bytes") == 0
        assert served.metric("router_media_cache_bytes") > 0
        assert served.metric("router_vision_backend", backend="cpu") == 1


async def test_an_unknown_model_is_one_series_whatever_it_is_called() -> None:
    async with serving(SimOptions()) as served:
        for name in ("a", "b", "c" * 1000):
            await served.refusal(tokenized("who?"), [("x-model", name)])
        await served.at_rest()
        (sample,) = served.samples("router_requests_total")
    assert sample.labels["model"] == "unknown" and sample.value == 3


async def test_label_values_are_of_fixed_sets() -> None:
    async with serving(SimOptions(), mm_processing="router") as served:
        await busy(served)
        requests = served.samples("router_requests_total")
        everything = [
            sample for metric in served.app.metrics.registry.collect() for sample in metric.samples
        ]
    reasons = {"", "deadline", "worker_refused", "internal"} | {r.name.lower() for r in TABLE}
    for sample in requests:
        assert sample.labels["outcome"] in OUTCOMES
        assert sample.labels["reason"] in reasons
    models = {s.labels["model"] for s in everything if "model" in s.labels}
    assert models <= {MODEL, "unknown", ""}
    workers = {s.labels["worker"] for s in everything if "worker" in s.labels}
    assert workers == {served.workers[0].address}


def of_worker(served: Serving, address: str) -> list[str]:
    return [
        sample.name
        for metric in served.app.metrics.registry.collect()
        for sample in metric.samples
        if sample.labels.get("worker") == address
    ]


async def test_a_worker_is_shown_while_it_is_registered_and_no_longer() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        worker = served.worker(0)
        await eventually(lambda: worker.load.reported is not None)
        shown = set(of_worker(served, worker.address))
        assert {
            *("router_worker_state", "router_worker_breaker_state", "router_worker_info"),
            *("router_worker_in_flight", "router_worker_reserved_tokens"),
            *("router_worker_running_requests", "router_worker_waiting_requests"),
            *("router_worker_kv_usage_ratio", "router_worker_load_age_seconds"),
            "router_worker_load_reports_total",
        } <= shown
        ready = {"worker": worker.address, "state": "ready"}
        assert served.metric("router_worker_state", **ready) == 1
        await served.app.fleet.remove(worker)
        assert of_worker(served, worker.address) == []


async def test_a_late_result_does_not_bring_back_a_worker_that_is_gone() -> None:
    async with serving(SimOptions(time_per_output_token=0.05), SimOptions()) as served:
        worker = served.worker(0)
        call = served.stub.Generate(streamed("hello", max_tokens=100), timeout=15)
        other = served.stub.Generate(streamed("hello", max_tokens=100), timeout=15)
        await eventually(lambda: worker.load.in_flight)
        # A breaker that opens when everything is over counts as late as well.
        lease = worker.lease(1)
        assert lease is not None
        await served.app.fleet.remove(worker)
        lease.release(CallResult.FAILURE)
        for each in (call, other):
            each.cancel()
        await served.at_rest()
        assert of_worker(served, worker.address) == []


async def test_what_a_worker_does_not_report_has_no_series() -> None:
    async with serving("127.0.0.1:1", ready=False) as served:
        names = of_worker(served, "127.0.0.1:1")
        info = [s.labels for s in served.samples("router_worker_info")]
    assert "router_worker_state" in names
    assert "router_worker_running_requests" not in names
    assert info[0]["model"] == ""


async def test_a_deadline_is_told_apart_from_a_cancel() -> None:
    async with serving(SimOptions(prefill_rate=1)) as served:
        # Long enough for the call to come to the router, however slow the machine.
        error = await served.refusal(tokenized("hello hello hello"), timeout=2)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.at_rest()
        (outcome,) = served.outcomes()
    assert outcome in {("client_cancelled", "deadline"), ("worker_failed", "worker_timeout")}


async def test_the_loop_s_lag_is_watched() -> None:
    async with serving(SimOptions()) as served:
        await eventually(lambda: served.metric("router_loop_lag_seconds_count") > 0)


def histograms() -> dict[str, Histogram]:
    return {name: m for name, m in vars(Metrics()).items() if isinstance(m, Histogram)}


def test_seconds_and_minutes_fall_into_different_finite_buckets() -> None:
    found = histograms()
    for name in ("duration", "first_output"):
        bounds = found[name]._upper_bounds
        assert sum(bound < 45 for bound in bounds) != sum(bound < 300 for bound in bounds)
        assert max(b for b in bounds if math.isfinite(b)) >= 600
    for name in ("stage", "fetch", "queue_wait", "loop_lag"):
        assert found[name]._upper_bounds[0] < 0.001
    assert found["fetch"]._upper_bounds != found["stage"]._upper_bounds


async def test_values_are_read_at_once_and_text_is_made_of_them_elsewhere() -> None:
    metrics, value = Metrics(), [1.0]
    metrics.show([Source("router_test", "A test.", lambda: [((), value[0])])])
    rendering = asyncio.create_task(metrics.render(""))
    await asyncio.sleep(0)
    value[0] = 2.0
    text, _ = await rendering
    assert b"\nrouter_test 1.0\n" in text


def test_a_name_is_not_given_twice() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="router_requests"):
        metrics.show([Source("router_requests", "Again.", list, counter=True)])


def test_the_prefix_index_and_its_streams_are_shown() -> None:
    metrics, index, reader = Metrics(), PrefixIndex(), EventReader()
    learner = Learner(lambda: 0.0)
    learner.learned, learner.ambiguous = 5, 2
    metrics.show(
        prefix_gauges(lambda: [("m", index)], lambda: [("w:1", reader)], lambda: [("m", learner)])
    )
    index.apply(index.join(), Stored(np.array([7]), None, np.arange(16, dtype=np.uint32), 16))
    reader.resyncs = 3
    value = metrics.registry.get_sample_value
    assert value("router_prefix_index_blocks", {"model": "m"}) == 1
    assert value("router_kv_event_resyncs_total", {"worker": "w:1"}) == 3
    assert value("router_media_names", {"model": "m"}) == 0
    assert value("router_media_names_learned_total", {"model": "m"}) == 5
    assert value("router_media_names_ambiguous_total", {"model": "m"}) == 2
