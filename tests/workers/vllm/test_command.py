from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers.vllm.command import command, environment
from workers.vllm.options import MmProcessor, OptionsError, WorkerOptions, kv_events_socket

MODEL = Path("/models/Qwen3-VL-8B")
PYTHON = Path("/opt/vllm/bin/python")


def flags(argv: list[str]) -> dict[str, list[str]]:
    """Each flag with the values up to the next one."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for argument in argv[argv.index("--grpc") :]:
        if argument.startswith("--"):
            values = found.setdefault(argument, [])
        else:
            values.append(argument)
    return found


def test_a_worker_serves_grpc_and_takes_references_by_default() -> None:
    argv = command(WorkerOptions(MODEL, PYTHON, port=50152))
    assert argv[0] == str(PYTHON)
    assert argv[argv.index("serve") + 1] == str(MODEL)
    assert flags(argv) == {
        "--grpc": [],
        "--host": ["127.0.0.1"],
        "--port": ["50152"],
        "--served-model-name": ["Qwen3-VL-8B"],
        "--mm-processor": ["inprocess"],
    }


def test_kv_events_go_to_the_endpoint_only() -> None:
    options = WorkerOptions(MODEL, PYTHON, kv_events="ipc:///run/kv")
    (config,) = flags(command(options))["--kv-events-config"]
    assert json.loads(config) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc:///run/kv",
    }


def test_media_flags_are_vllms_own() -> None:
    options = WorkerOptions(
        MODEL,
        PYTHON,
        mm_processor=MmProcessor.REDIS,
        redis_url="redis://127.0.0.1",
        allowed_media_domains=("a.example", "b.example"),
        media_local_root=Path("/srv/media"),
    )
    found = flags(command(options))
    assert found["--mm-processor"] == ["redis"]
    assert found["--mm-redis-url"] == ["redis://127.0.0.1"]
    assert found["--allowed-media-domains"] == ["a.example", "b.example"]
    assert found["--allowed-local-media-path"] == ["/srv/media"]


@pytest.mark.parametrize(
    "extra",
    [("--served-model-name", "mine"), ("--served-model-name=mine",), ("--served_model_name=mine",)],
)
def test_a_flag_of_the_callers_replaces_ours(extra: tuple[str, ...]) -> None:
    argv = command(WorkerOptions(MODEL, PYTHON, extra=(*extra, "--seed", "0")))
    assert "Qwen3-VL-8B" not in argv
    assert argv[-len(extra) - 2 :] == [*extra, "--seed", "0"]


def test_the_environment_cannot_contradict_the_flags() -> None:
    options = WorkerOptions(MODEL, PYTHON, pairing_protocol="nixl-2")
    base = {"SMG_VLLM_MM_PROCESSOR": "off", "PATH": "/bin"}
    assert environment(options, base) == {"PATH": "/bin", "SMG_PAIRING_PROTOCOL": "nixl-2"}


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "127.0.0.1:50051"),
        ("", "127.0.0.1:50051"),
        ("::", "[::1]:50051"),
        ("10.0.0.7", "10.0.0.7:50051"),
    ],
)
def test_a_worker_on_every_interface_is_reached_on_loopback(host: str, address: str) -> None:
    assert WorkerOptions(MODEL, PYTHON, host=host).address == address


def test_a_model_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="not a folder on this machine"):
        WorkerOptions(Path("Qwen/Qwen3-VL-8B-Instruct"), PYTHON).check()
    with pytest.raises(OptionsError, match=r"no config\.json"):
        WorkerOptions(tmp_path, PYTHON).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_events": "tcp://127.0.0.1:5557"}, "connect to it instead of listening"),
        ({"kv_events": "5557"}, "neither"),
        ({"kv_events": "ipc:///x", "extra": ("--data-parallel-size", "2")}, "one TCP port a rank"),
        ({"redis_url": "redis://127.0.0.1"}, "needs --mm-processor redis"),
        ({"media_local_root": Path("/no/such/folder")}, "is not a folder"),
    ],
)
def test_what_vllm_would_notice_late_is_noticed_early(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    WorkerOptions(tmp_path, PYTHON).check()
    with pytest.raises(OptionsError, match=message):
        WorkerOptions(tmp_path, PYTHON, **change).check()  # type: ignore[arg-type]


def test_endpoints_that_listen_are_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for endpoint in ("tcp://*:5557", kv_events_socket(50051)):
        WorkerOptions(tmp_path, PYTHON, kv_events=endpoint).check()
