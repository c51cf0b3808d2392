"""What is known of a worker, while the worker changes behind it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from unittest.mock import Mock

import grpc
import pytest

from router.fleet import probe
from router.fleet.breaker import CallResult
from router.fleet.health import HealthQuestions
from router.fleet.worker import Worker, WorkerState
from router.wire import common, engine
from tests.fleet.running import fleet, sim
from tests.serving import eventually
from workers.sim import SimOptions

READY, PENDING = WorkerState.READY, WorkerState.PENDING
UNHEALTHY, DRAINING = WorkerState.UNHEALTHY, WorkerState.DRAINING


def in_state(worker: Worker, state: WorkerState) -> bool:
    return worker.state is state


async def test_metadata_that_fail_three_times_and_then_work() -> None:
    faults = ("GetServerInfo: 3*fail=UNAVAILABLE",)
    async with sim(SimOptions(faults=faults)) as worker, fleet() as running:
        added = running.add(worker.address)
        await eventually(lambda: "This call fails" in added.state_reason)
        assert added.state is PENDING
        await eventually(lambda: in_state(added, READY))
        assert worker.stats.calls["GetServerInfo"] >= 4


async def test_a_worker_that_is_not_up_yet_is_pending_and_says_why() -> None:
    async with sim() as first, fleet() as running:
        address = first.address
        await first.stop(0)
        added = running.add(address)
        await eventually(lambda: added.state_reason.startswith("metadata: UNAVAILABLE"))
        assert added.state is PENDING
        async with sim(listen=address):
            await eventually(lambda: in_state(added, READY))


async def test_a_worker_that_warms_up_is_not_ready_before_it_says_so() -> None:
    async with sim(SimOptions(warmup=3600)) as worker, fleet() as running:
        added = running.add(worker.address)
        await eventually(lambda: "NOT_SERVING" in added.state_reason)
        assert added.state is PENDING
        await worker.set_serving(True)
        await eventually(lambda: in_state(added, READY))


async def test_a_worker_s_own_word_counts_at_once() -> None:
    # No check is due for an hour: only Watch can have told.
    async with sim() as worker, fleet(health_interval=3600) as running:
        added = running.add(worker.address)
        await eventually(lambda: in_state(added, READY) and worker.servicer.serving)
        await worker.set_serving(False)
        await eventually(lambda: in_state(added, UNHEALTHY))
        assert added.state_reason == "health: NOT_SERVING"
        await worker.set_serving(True)
        await eventually(lambda: in_state(added, READY))


async def test_an_answer_from_before_the_worker_s_own_word_does_not_undo_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with sim() as worker, fleet() as running:
        added = running.add(worker.address)
        seen: list[WorkerState] = []
        check, outrun, later = HealthQuestions.check, asyncio.Event(), 0

        async def slow(questions: HealthQuestions, timeout: float) -> None:
            nonlocal later
            later += outrun.is_set()
            await check(questions, timeout)
            if added.state is READY:
                await worker.set_serving(False)
                await eventually(lambda: in_state(added, UNHEALTHY))
                running.registry.listen(lambda: seen.append(added.state))
                outrun.set()

        monkeypatch.setattr(HealthQuestions, "check", slow)
        await eventually(lambda: later > 1)
        assert READY not in seen


async def test_a_dead_worker_is_found_out_by_its_connection() -> None:
    async with sim() as worker, fleet(health_interval=3600) as running:
        added = running.add(worker.address)
        await eventually(lambda: in_state(added, READY))
        await worker.stop(0)
        await eventually(lambda: in_state(added, UNHEALTHY))


async def test_capability_is_read_again_without_a_new_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Mock()
    monkeypatch.setattr(probe, "_log", log)
    async with sim() as worker, fleet() as running:
        added = running.add(worker.address)
        await eventually(lambda: in_state(added, READY))
        worker.change(mm_processor="")
        await eventually(lambda: added.capability and not added.capability.takes_media_refs)
        assert running.registry.get(worker.address) is added
        (told,) = [c for c in log.info.call_args_list if c.args == ("capability_changed",)]
        assert told.kwargs["changed"] == ["mm_processor", "schemes"]


async def test_capability_is_read_at_once_when_it_is_asked_for() -> None:
    async with sim() as worker, fleet(health_interval=3600, metadata_interval=3600) as running:
        added = running.add(worker.address)
        await eventually(lambda: in_state(added, READY))
        worker.change(max_num_seqs=3)
        running.reread(added)
        await eventually(lambda: added.capability and added.capability.max_num_seqs == 3)


@pytest.mark.parametrize("change", [{"kv_engine_id": "another"}, {"served_model": "another/name"}])
async def test_another_engine_at_the_address_is_another_generation(
    change: dict[str, str],
) -> None:
    async with sim() as worker, fleet() as running:
        old = running.add(worker.address)
        await eventually(lambda: in_state(old, READY))
        lease = old.lease(7)
        assert lease is not None
        worker.change(**change)
        await eventually(lambda: running.registry.get(worker.address) is not old)
        new = running.registry.get(worker.address)
        assert new is not None
        await eventually(lambda: in_state(new, READY))
        assert new.generation > old.generation
        assert old.state is DRAINING
        assert old.state_reason.startswith("replaced: ")
        assert list(running.registry) == [old, new]
        assert (old.load.in_flight, new.load.in_flight) == (1, 0)
        lease.release(CallResult.SUCCESS)
        assert (old.load.in_flight, new.load.in_flight) == (0, 0)
        await eventually(lambda: in_state(old, WorkerState.GONE))
        assert list(running.registry) == [new]


async def test_a_restarted_worker_is_known_for_nothing_that_the_last_one_was() -> None:
    async with sim() as first, fleet() as running:
        address = first.address
        old = running.add(address)
        await eventually(lambda: in_state(old, READY))
        for _ in range(10):
            lease = old.lease(1)
            if lease is not None:
                lease.release(CallResult.FAILURE)
        assert old.breaker.state.value == "open"
        old.load.report_engine(common.EngineLoad(running_requests=9))
        await first.stop(0)
        options = SimOptions(mm_processor="", model="another/model")
        async with sim(options, listen=address):
            await eventually(lambda: running.registry.get(address) is not old)
            new = running.registry.get(address)
            assert new is not None
            await eventually(lambda: in_state(new, READY))
            assert new.model_name == "another/model"
            assert new.capability is not None
            assert not new.capability.takes_media_refs
            assert new.breaker.state.value == "closed"
            assert list(running.registry.model_names) == ["another/model"]


async def test_a_worker_of_another_model_than_is_expected_there_is_not_routable() -> None:
    async with sim() as worker, fleet() as running:
        added = running.add(worker.address, model="mine")
        await eventually(lambda: added.state_reason == "it serves sim/Qwen3-VL, not mine")
        assert added.state is PENDING
        assert not running.registry.routable
        worker.change(served_model="mine")
        await eventually(lambda: in_state(added, READY))


async def test_a_worker_that_hangs_with_requests_there_is_suspected_at_the_first_timeout() -> None:
    options = SimOptions(faults=("GetLoads: hang",))
    async with (
        sim(options) as worker,
        fleet(health_interval=3600, health_timeout=0.1, health_failures=100) as running,
    ):
        added = running.add(worker.address)
        await eventually(lambda: worker.stats.calls["GetLoads"] > 2)
        assert added.state is READY, "without requests of ours the count goes on"
        lease = added.lease(5)
        assert lease is not None
        await eventually(lambda: in_state(added, UNHEALTHY))
        assert added.state_reason.startswith("suspected: no answer for ")
        lease.release(CallResult.NEUTRAL)


async def test_a_timeout_that_is_noticed_late_is_our_own() -> None:
    began = time.monotonic()
    options = SimOptions(faults=("GetLoads: hang",))
    async with sim(options) as worker, fleet(health_timeout=0.1, clock=hurried(began)) as running:
        added = running.add(worker.address)
        await eventually(lambda: in_state(added, READY))
        lease = added.lease(5)
        assert lease is not None
        asked = worker.stats.calls["GetLoads"]
        await eventually(lambda: worker.stats.calls["GetLoads"] > asked + 2)
        assert added.state is READY
        lease.release(CallResult.NEUTRAL)


def hurried(began: float) -> Callable[[], float]:
    """A clock by which everything takes a hundred times as long."""
    return lambda: began + 100 * (time.monotonic() - began)


async def test_an_engine_that_reports_its_own_silence_is_not_used_until_it_speaks() -> None:
    async with sim() as worker, fleet(engine_silence=30.0) as running:
        added = running.add(worker.address)
        await eventually(lambda: in_state(added, READY))
        lease = added.lease(5)
        assert lease is not None
        added.load.report_engine(common.EngineLoad(running_requests=1, engine_silence_ms=31_000))
        await eventually(lambda: in_state(added, UNHEALTHY))
        # And for as long as it took to notice.
        silent = re.search(r"silent for (\d+)s", added.state_reason)
        assert silent and int(silent[1]) >= 31
        added.load.report_engine(common.EngineLoad(running_requests=1, engine_silence_ms=10))
        await eventually(lambda: in_state(added, READY))
        lease.release(CallResult.SUCCESS)


async def test_nothing_is_asked_while_the_worker_pushes() -> None:
    async with sim() as worker, fleet() as running:
        added = running.add(worker.address)
        await eventually(lambda: added.load.reported)
        added.load.report_engine(common.EngineLoad(running_requests=3))
        asked = worker.stats.calls["GetLoads"]
        checks = worker.stats.calls["GetServerInfo"]
        await eventually(lambda: worker.stats.calls["GetServerInfo"] > checks + 2)
        assert worker.stats.calls["GetLoads"] <= asked + 1, "one may have been on its way"
        assert added.load.reported is not None
        assert added.load.reported.running == 3


async def test_a_worker_without_load_reports_is_unknown_not_failed() -> None:
    options = SimOptions(faults=("GetLoads: fail=UNIMPLEMENTED",))
    async with sim(options) as worker, fleet() as running:
        added = running.add(worker.address)
        await eventually(lambda: worker.stats.calls["GetLoads"] == 1)
        counted = running.registry.metrics.registry.get_sample_value
        name = "router_worker_load_reports_total"
        labels = {"worker": worker.address}
        await eventually(lambda: counted(name, {**labels, "source": "unknown"}) == 1)
        assert counted(name, {**labels, "source": "failed"}) is None
        assert added.load.reported is None
        assert added.state is READY


class OwnHealthOnly(grpc.aio.ServerInterceptor):
    """Hides the standard health service."""

    async def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
        hidden = details.method.startswith("/grpc.health.v1")
        return None if hidden else await continuation(details)


async def test_a_worker_with_its_own_health_method_only(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = grpc.aio.server
    monkeypatch.setattr(
        grpc.aio,
        "server",
        lambda **given: plain(interceptors=[OwnHealthOnly()], **given),
    )
    async with sim() as worker, fleet() as running:
        added = running.add(worker.address)
        await eventually(lambda: in_state(added, READY))
        assert worker.stats.calls["HealthCheck"] >= 1
        worker.servicer.serving = False
        await eventually(lambda: in_state(added, UNHEALTHY))


async def test_a_reason_that_repeats_is_one_change(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[tuple[str, str]] = []
    async with sim(SimOptions(faults=("GetModelInfo: 4*fail=INTERNAL",))) as worker, fleet() as f:
        added = f.add(worker.address)
        f.registry.listen(lambda: changes.append((added.state.value, added.state_reason)))
        await eventually(lambda: in_state(added, READY))
        assert [state for state, _ in changes] == ["ready"]


async def test_draining_waits_for_what_runs_and_then_closes_the_channel() -> None:
    async with sim() as worker, fleet() as running:
        added = running.add(worker.address)
        await eventually(lambda: in_state(added, READY))
        lease = added.lease(1)
        assert lease is not None
        running.drain(added)
        assert added.state is DRAINING
        again = running.add(worker.address)
        await eventually(lambda: in_state(again, READY))
        assert added.state is DRAINING
        lease.release(CallResult.SUCCESS)
        await eventually(lambda: in_state(added, WorkerState.GONE))
        await eventually(lambda: added.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
        assert again.state is READY


async def test_new_credentials_mean_new_connections_and_nothing_else() -> None:
    async with sim() as worker, fleet() as running:
        added = running.add(worker.address)
        await eventually(lambda: in_state(added, READY))
        before = added.channel
        await running.renew_channels()
        assert before.get_state() is not grpc.ChannelConnectivity.SHUTDOWN, "calls may be on it"
        assert added.channel is not before
        assert added.state is READY
        checks = worker.stats.calls["GetServerInfo"]
        await eventually(lambda: worker.stats.calls["GetServerInfo"] > checks)
        assert running.registry.get(worker.address) is added
        await running.remove(added)
        for channel in (before, added.channel):
            assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_a_worker_that_goes_while_others_are_connected_anew_is_no_harm() -> None:
    async with sim() as worker, fleet() as running:
        added = running.add(worker.address)
        leaving = running.add("127.0.0.1:9")
        await eventually(lambda: in_state(added, READY))
        before = added.channel
        renewal = asyncio.create_task(running.renew_channels())
        await asyncio.sleep(0)
        await running.remove(leaving)
        await renewal
        assert added.channel is not before
        await eventually(lambda: worker.stats.calls["GetServerInfo"] > 1)


async def test_a_removal_is_finished_when_nobody_waits_for_it_any_more() -> None:
    async with sim() as worker, fleet() as running:
        added = running.add(worker.address)
        await eventually(lambda: in_state(added, READY))
        removal = asyncio.create_task(running.remove(added))
        await asyncio.sleep(0)
        removal.cancel()
        await eventually(lambda: added.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
        assert len(running.registry) == 0


async def test_a_worker_that_refuses_every_request_is_not_asked_again_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Longer than this takes, however slow the machine.
    monkeypatch.setattr(probe, "_REREAD_PAUSE", 3600.0)
    async with sim() as worker, fleet(health_interval=3600) as running:
        added = running.add(worker.address)
        await eventually(lambda: in_state(added, READY))
        asked = worker.stats.calls["GetServerInfo"]
        for _ in range(50):
            running.reread(added)
            await added.stub.GetLoads(engine.GetLoadsRequest(), timeout=10)
        assert worker.stats.calls["GetServerInfo"] == asked
