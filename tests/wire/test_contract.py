"""Our wire against the published one: every upstream definition, plus extensions from 1000 on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FIRST_EXTENSION = 1000
Dump = dict[str, dict[str, Any]]


def dump(module: str) -> Dump:
    script = Path(__file__).with_name("dump_descriptors.py")
    command = [sys.executable, str(script), module]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    loaded: Dump = json.loads(result.stdout)
    return loaded


@pytest.fixture(scope="module")
def ours() -> Dump:
    return dump("router.wire.vllm_engine_pb2")


@pytest.fixture(scope="module")
def published() -> Dump:
    return dump("smg_grpc_proto.generated.vllm_engine_pb2")


def test_the_published_contract_was_read(published: Dump) -> None:
    assert "vllm.grpc.engine.GenerateRequest" in published["messages"]
    assert "smg.grpc.common.KvEventBatch" in published["messages"]
    assert "Generate" in published["services"]["vllm.grpc.engine.VllmEngine"]


def test_every_published_field_is_ours_unchanged(ours: Dump, published: Dump) -> None:
    different = {
        f"{message}.{name}": (field, ours["messages"].get(message, {}).get(name))
        for message, fields in published["messages"].items()
        for name, field in fields.items()
        if ours["messages"].get(message, {}).get(name) != field
    }
    assert different == {}
    assert published["messages"].keys() <= ours["messages"].keys()


def test_every_published_enum_is_ours_unchanged(ours: Dump, published: Dump) -> None:
    assert {name: ours["enums"].get(name) for name in published["enums"]} == published["enums"]


def test_every_published_call_is_ours_unchanged(ours: Dump, published: Dump) -> None:
    assert {name: ours["services"].get(name) for name in published["services"]} == published[
        "services"
    ]


def test_our_own_fields_are_numbered_as_extensions(ours: Dump, published: Dump) -> None:
    extensions = {
        f"{message}.{name}": field["number"]
        for message, fields in published["messages"].items()
        for name, field in ours["messages"][message].items()
        if name not in fields
    }
    assert extensions == {
        "vllm.grpc.engine.GenerateRequest.router": 1000,
        "vllm.grpc.engine.MediaRef.data": 1000,
        "vllm.grpc.engine.MediaRef.hints": 1001,
    }
    assert all(number >= FIRST_EXTENSION for number in extensions.values())
