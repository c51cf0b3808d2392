import json
from typing import Any

import grpc
import pytest

from router.cli import run
from router.cli.workers import age
from router.wire import admin
from tests.cli.servers import Admin, serving

READY = admin.Worker(
    address="10.0.0.1:50051",
    state=admin.WorkerState.READY,
    seconds_in_state=125,
    role=admin.WorkerRole.BOTH,
    model="m",
    capability=admin.Capability(mm_processor="inprocess"),
    load=admin.Load(in_flight=3, running=2, waiting=0, age_seconds=0.42, breaker="closed"),
)
PENDING = admin.Worker(
    address="10.0.0.22:50051", state=admin.WorkerState.PENDING, reason="metadata not read yet"
)


def ask(answer: object, action: str, *args: str) -> tuple[int, Admin]:
    server = Admin(answer)
    with serving(server) as address:
        return run(["workers", action, "--addr", address, *args]), server


def test_list_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = ask(admin.ListWorkersResponse(workers=[READY, PENDING]), "list")
    assert code == 0
    header, ready, pending = capsys.readouterr().out.splitlines()
    assert header.startswith("ADDRESS          STATE")
    assert " ".join(ready.split()) == (
        "10.0.0.1:50051 ready 2m05s both m inprocess 3 2/0 0.4s closed -"
    )
    assert "metadata not read yet" in pending
    assert header.index("STATE") == ready.index("ready") == pending.index("pending")


def test_what_is_not_reported_is_not_zero(capsys: pytest.CaptureFixture[str]) -> None:
    half = admin.Worker(address="a:1", load=admin.Load(running=0))
    ask(admin.ListWorkersResponse(workers=[half, PENDING]), "list")
    _, reported, silent = capsys.readouterr().out.splitlines()
    assert "0/?" in reported
    assert "/" not in silent


def test_a_worker_without_media_processor_gets_tensors_from_the_router(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = admin.Worker(address="a:1", capability=admin.Capability())
    ask(admin.ListWorkersResponse(workers=[text]), "list")
    assert "router" in capsys.readouterr().out.splitlines()[1]


def test_an_empty_fleet_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = ask(admin.ListWorkersResponse(), "list")
    assert (code, capsys.readouterr().out) == (0, "no workers\n")


class Restarting(Admin):
    """Answers twice and is gone."""

    def ListWorkers(self, request: Any, context: grpc.ServicerContext) -> Any:
        if len(self.requests) == 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        return self._answer(request, context)


def test_watching_shows_the_table_until_the_router_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Restarting(admin.ListWorkersResponse(workers=[READY]))
    with serving(server) as address:
        assert run(["workers", "list", "--addr", address, "--watch", "1ms"]) == 1
    told = capsys.readouterr()
    assert told.out.count("10.0.0.1:50051") == told.out.count("ADDRESS") == 2
    # Not a terminal: nothing is erased.
    assert "\x1b" not in told.out
    assert "restarting" in told.err


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    ask(admin.ListWorkersResponse(workers=[READY, PENDING]), "list", "--json")
    ready, pending = json.loads(capsys.readouterr().out)
    assert ready["load"]["in_flight"] == 3
    assert pending["state"] == "PENDING"


def test_add_sends_role_and_labels(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--role", "prefill", "--label", "zone=a", "--label", "gpu=h200"]
    code, server = ask(admin.AddWorkerResponse(worker=PENDING), "add", "h:1", *options)
    assert code == 0
    assert server.requests == [
        admin.AddWorkerRequest(
            address="h:1", role=admin.WorkerRole.PREFILL, labels={"zone": "a", "gpu": "h200"}
        )
    ]
    assert "pending" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("action", "request_type", "response_type"),
    [
        ("drain", admin.DrainWorkerRequest, admin.DrainWorkerResponse),
        ("remove", admin.RemoveWorkerRequest, admin.RemoveWorkerResponse),
    ],
)
def test_drain_and_remove_name_the_worker(
    action: str,
    request_type: type,
    response_type: type,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, server = ask(response_type(worker=READY), action, "h:1", "--json")
    assert code == 0
    assert server.requests == [request_type(address="h:1")]
    assert json.loads(capsys.readouterr().out)["address"] == READY.address


@pytest.mark.parametrize("args", [[], ["add"], ["add", "h:1", "--label", "x"], ["list", "h:1"]])
def test_bad_arguments_are_a_usage_error(args: list[str]) -> None:
    assert run(["workers", *args]) == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (9.94, "9.9s"), (59, "59s"), (60, "1m00s"), (7620, "2h07m")],
)
def test_ages_are_short(seconds: float, text: str) -> None:
    assert age(seconds) == text
