import json
from pathlib import Path

import grpc
import pytest

from router.cli import run
from router.wire import admin
from tests.cli.servers import Admin, Engine, serving
from tests.e2e.certificates import Authority

EXPLAINED = admin.ExplainResponse(
    model="m",
    mode="router",
    reason="auto_mixed",
    policy="least_load",
    prefixes="not scored: the policy is least_load",
    prompt_tokens=20,
    estimated_tokens=300,
    picked="a:1",
    constraint=["takes tensors of uint8"],
    items=[
        admin.ExplainedItem(
            index=0, modality="image", source="data", forwardable=True, width=640, height=480
        ),
        admin.ExplainedItem(index=1, modality="image", source="inline", why_not="inline bytes"),
    ],
    workers=[
        admin.ExplainedWorker(address="a:1", admitted=True, cost=0.25, matched_blocks=7),
        admin.ExplainedWorker(address="b:1", cause="draining", matched_blocks=1),
    ],
)


def test_the_plan_is_told_and_nothing_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    engine, desk = Engine(), Admin(EXPLAINED)
    with serving(engine, desk) as address:
        assert run(["explain", "--addr", address, "--image", "http://h/a.png", "what?"]) == 0
    assert engine.requests == []
    assert desk.requests[0].request.media_refs.items[0].url == "http://h/a.png"
    text = capsys.readouterr().out
    for told in ("router (auto_mixed)", "640x480", "no: inline bytes", "draining", "uint8"):
        assert told in text
    for told in ("not scored: the policy is least_load", "0.250s", "7 blocks", "1 block "):
        assert told in text


def test_the_admin_service_may_listen_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    desk = Admin(EXPLAINED)
    with serving(Engine()) as address, serving(desk) as admin_address:
        code = run(["explain", "--addr", address, "--admin-addr", admin_address, "--json", "hi"])
    assert code == 0
    assert len(desk.requests) == 1
    assert json.loads(capsys.readouterr().out)["reason"] == "auto_mixed"


def test_tls_of_the_listener_is_none_of_the_admin_socket(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    certificate, key = authority.issue("router")
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    desk, socket = Admin(EXPLAINED), f"unix:{tmp_path}/admin"
    with (
        serving(Engine(), credentials=credentials) as address,
        serving(desk, listen=socket),
    ):
        tls = ["--tls", "--tls-ca", str(authority.ca), "--admin-addr", socket]
        assert run(["explain", "--addr", address, *tls, "hi"]) == 0
    assert len(desk.requests) == 1


def test_a_router_without_the_admin_service_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Engine()) as address:
        assert run(["explain", "--addr", address, "hi"]) == 1
    assert "error: UNIMPLEMENTED" in capsys.readouterr().err


def test_nobody_admissible_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Engine(), Admin(admin.ExplainResponse(model="m"))) as address:
        assert run(["explain", "--addr", address, "hi"]) == 0
    assert "nobody is admissible" in capsys.readouterr().out
