"""Settings: where they come from, which wins, and what is told of bad ones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from router.config import (
    TABLES,
    ConfigError,
    Settings,
    add_flags,
    flags_of,
    load,
    sources,
    unknown_variables,
    worker_address,
)
from router.policy.settings import PolicyOverride, PolicySettings
from router.rooms import policy_overrides, policy_settings


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.upper().startswith(("MMROUTER_", "SMG_")):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "router.toml"
        path.write_text(text)
        return path

    return write


def parsed(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return flags_of(parser.parse_args(arguments))


# -- Precedence


def test_flags_beat_the_environment_and_that_beats_the_file(
    monkeypatch: pytest.MonkeyPatch, file: Any
) -> None:
    path = file('policy = "random"\nmax_concurrent = 5\nqueue_size = 6\n')
    assert load({}, path).policy == "random"
    monkeypatch.setenv("MMROUTER_POLICY", "least_load")
    monkeypatch.setenv("MMROUTER_MAX_CONCURRENT", "7")
    chosen = load({"policy": "power_of_two"}, path)
    assert (chosen.policy, chosen.max_concurrent, chosen.queue_size) == ("power_of_two", 7, 6)


@pytest.mark.parametrize("name", ["MMROUTER_MM_PROCESSING", "SMG_MM_PROCESSING"])
def test_the_mode_has_two_names_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, file: Any, name: str
) -> None:
    path = file('mm_processing = "worker"\n')
    assert load({}, path).mm_processing == "worker"
    monkeypatch.setenv(name, "router")
    assert load({}).mm_processing == "router"
    assert load({}, path).mm_processing == "router"
    assert load({"mm_processing": "auto"}, path).mm_processing == "auto"


def test_our_own_name_beats_the_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMG_MM_PROCESSING", "worker")
    monkeypatch.setenv("MMROUTER_MM_PROCESSING", "router")
    assert load({}).mm_processing == "router"


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("prefix", ["MMROUTER", "SMG"])
def test_input_limits_are_read_under_both_names(
    monkeypatch: pytest.MonkeyPatch, kind: str, prefix: str
) -> None:
    monkeypatch.setenv(f"{prefix}_{kind.upper()}_MAX_INPUT_BYTES", "64MiB")
    assert getattr(load({}), f"{kind}_max_input_bytes") == 64 << 20


def test_the_environments_names_are_read_whatever_their_case(
    monkeypatch: pytest.MonkeyPatch, file: Any
) -> None:
    monkeypatch.setenv("mmrouter_policy", "random")
    assert load({}, file('policy = "least_load"\n')).policy == "random"


def test_nothing_said_is_the_defaults() -> None:
    settings = load({})
    assert settings == Settings()
    assert settings.worker == ()
    assert settings.mm_processing == "auto"


# -- Values


def test_workers_come_as_a_list_or_with_commas(monkeypatch: pytest.MonkeyPatch, file: Any) -> None:
    both = ("a:1", "b:2")
    assert load({}, file('worker = ["grpc://a:1", "b:2"]\n')).worker == both
    assert load({}, file('worker = "a:1, grpc://b:2/"\n')).worker == both
    assert load(parsed("--worker", "grpc://a:1", "--worker", "b:2")).worker == both
    assert load(parsed("--worker", "a:1,b:2")).worker == both
    monkeypatch.setenv("MMROUTER_WORKER", "a:1,b:2")
    assert load({}).worker == both


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("grpc://h:50051", "h:50051"),
        ("10.0.0.1:1", "10.0.0.1:1"),
        ("grpc://[::1]:50051", "[::1]:50051"),
        (" h:050 ", "h:50"),
    ],
)
def test_an_address_of_a_worker(text: str, address: str) -> None:
    assert worker_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h",
        "h:",
        ":1",
        "h:0",
        "h:65536",
        "h:x",
        "http://h:1",
        "::1:50051",
        "h/x:1",
        "h:²",
        "h\0:1",
        "a b:1",
        "h\n:1",
    ],
)
def test_what_is_no_address_of_a_worker(text: str) -> None:
    with pytest.raises(ValueError):
        worker_address(text)


@pytest.mark.parametrize("field", ["listen", "http", "admin"])
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("127.0.0.1:0", True),
        ("[::1]:50050", True),
        ("router.example:65535", True),
        ("unix:/run/mmrouter", True),
        ("127.0.0.1:65536", False),
        ("127.0.0.1", False),
        ("127.0.0.1:", False),
        (":50050", False),
        ("127.0.0.1:²", False),
        ("::1:50050", False),
        ("tcp://127.0.0.1:1", False),
        ("unix:", False),
    ],
)
def test_an_address_to_listen_on(field: str, text: str, fits: bool) -> None:
    if fits:
        assert getattr(load({field: text}), field) == text
    else:
        with pytest.raises(
            ConfigError, match=f"^{field}: not an address to listen on: .*unix:PATH"
        ):
            load({field: text})


def test_only_the_grpc_listener_has_to_be() -> None:
    assert load({"http": "", "admin": ""}).http == ""
    with pytest.raises(ConfigError, match=r"^listen: "):
        load({"listen": ""})


@pytest.mark.parametrize("text", ["foo", "collector:4317", "grpc://collector:4317", "http://"])
def test_what_is_no_collector(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^otlp_endpoint: not a collector"):
        load({"otlp_endpoint": text})
    assert load({"otlp_endpoint": "https://collector:4317"}).otlp_endpoint


def test_durations_and_sizes_are_read_as_people_write_them(file: Any) -> None:
    text = 'drain_timeout = "1m30s"\nmax_message_bytes = "64MiB"\nidle_timeout = 7\n'
    settings = load({}, file(text))
    assert settings.drain_timeout == 90
    assert settings.max_message_bytes == 64 << 20
    assert settings.idle_timeout == 7


def test_switches_have_a_flag_for_either_side() -> None:
    assert load(parsed("--no-overload-shed", "--allow-mm-override")).overload_shed is False
    assert load(parsed("--allow-mm-override")).allow_mm_override is True


# -- The environment

OF_A_SERVICE = {
    "MMROUTER_SERVICE_HOST": "10.96.0.7",
    "MMROUTER_SERVICE_PORT": "50050",
    "MMROUTER_SERVICE_PORT_GRPC": "50050",
    "MMROUTER_PORT": "tcp://10.96.0.7:50050",
    "MMROUTER_PORT_50050_TCP": "tcp://10.96.0.7:50050",
    "MMROUTER_PORT_50050_TCP_PROTO": "tcp",
    "MMROUTER_PORT_50050_TCP_PORT": "50050",
    "MMROUTER_PORT_50050_TCP_ADDR": "10.96.0.7",
    "MMROUTER_METRICS_SERVICE_HOST": "10.96.0.8",
    "MMROUTER_HTTP_PORT_9090_TCP_ADDR": "10.96.0.8",
}


def test_what_kubernetes_tells_of_services_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_A_SERVICE.items():
        monkeypatch.setenv(name, value)
    assert load({}) == Settings()
    assert unknown_variables(OF_A_SERVICE) == []


def test_a_misspelt_variable_is_told_with_the_nearest_setting() -> None:
    names = ["PATH", "MMROUTER_POLICY", "mmrouter_policy", "SMG_MM_PROCESSING", "SMG_X"]
    assert unknown_variables(names) == []
    assert unknown_variables(["MMROUTER_POLCY", "mmrouter_drain_timout", "MMROUTER_ZZZ"]) == [
        ("MMROUTER_POLCY", "MMROUTER_POLICY"),
        ("MMROUTER_ZZZ", ""),
        ("mmrouter_drain_timout", "MMROUTER_DRAIN_TIMEOUT"),
    ]


@pytest.mark.parametrize("field", sorted(Settings.model_fields))
def test_no_setting_s_variable_is_taken_for_a_services(field: str) -> None:
    assert not unknown_variables([f"MMROUTER_{field.upper()}"])
    assert not sources._OF_A_SERVICE.fullmatch(f"MMROUTER_{field.upper()}")


# -- Refusals


def test_an_unknown_key_of_a_file_is_an_error(file: Any) -> None:
    with pytest.raises(ConfigError, match="unknown key: polcy, zzz"):
        load({}, file('zzz = 1\npolcy = "random"\n'))


def test_a_files_table_is_no_setting(file: Any) -> None:
    with pytest.raises(ConfigError, match="unknown key: router"):
        load({}, file('[router]\npolicy = "random"\n'))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, file: Any) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load({}, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"router\.toml"):
        load({}, file("policy = = 1\n"))
    path = file("")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError):
        load({}, path)


def test_every_bad_value_has_a_line(monkeypatch: pytest.MonkeyPatch, file: Any) -> None:
    path = file('policy = "best"\nqueue_size = -1\n')
    monkeypatch.setenv("SMG_MM_PROCESSING", "somewhere")
    with pytest.raises(ConfigError) as error:
        load({"drain_timeout": "soon", "worker": "h:1,nowhere"}, path)
    lines = dict(line.split(": ", 1) for line in str(error.value).splitlines())
    assert set(lines) == {"policy", "queue_size", "mm_processing", "drain_timeout", "worker"}
    assert "nowhere" in lines["worker"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_message_bytes", "0"),
        ("max_message_bytes", "2GiB"),
        ("max_message_bytes", "-1"),
        ("max_message_bytes", "65535"),
        ("keepalive_worker_interval", "10s"),
        ("keepalive_worker_interval", "1000h"),
        ("keepalive_min_client_interval", "1000h"),
        ("retry_max_attempts", "0"),
        ("breaker_failure_ratio", "0"),
        ("breaker_failure_ratio", "1.5"),
        ("breaker_probes", "0"),
        ("max_concurrent", "0"),
        ("health_interval", "0s"),
        ("request_timeout", "nan"),
        ("sim", "65"),
        ("vision_backend", "tpu"),
        ("retry_budget", "nan"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        load({field: value})


@pytest.mark.parametrize("field", ["request_timeout", "max_message_bytes"])
@pytest.mark.parametrize("value", ["[1]", "true", "{ a = 1 }", "2020-01-01"])
def test_a_value_of_another_kind_is_refused_by_name(file: Any, field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: not a (duration|size)"):
        load({}, file(f"{field} = {value}"))


def test_a_table_in_the_environment_that_is_no_table_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MMROUTER_MODELS", "abc")
    with pytest.raises(ConfigError, match="MMROUTER_MODELS"):
        load({})


def test_settings_do_not_change_once_read() -> None:
    with pytest.raises(ValidationError):
        load({}).policy = "random"  # type: ignore[misc]


# -- Flags


def test_every_setting_has_its_flag_and_only_given_ones_are_read() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for field in Settings.model_fields.keys() - TABLES:
        assert f"--{field.replace('_', '-')}" in flags
    assert flags_of(parser.parse_args([])) == {}
    parser.format_help()


# -- Policies


def test_the_policy_room_is_told_all_of_its_settings() -> None:
    assert policy_settings(load({})) == PolicySettings()
    told = {
        "policy": "prefix",
        "prefix_credit": 0.25,
        "prefill_weight": 2.0,
        "wait_weight": 3.0,
        "crowd_weight": 4.0,
        "spill_wait": 6.0,
        "silence_veto": 7.0,
        "prefix_temperature": 8.0,
        "event_bridge": 9.0,
        "approximate_ttl": 10.0,
        "hash_load_factor": 11.0,
    }
    assert policy_settings(load(told)) == PolicySettings(**told)  # type: ignore[arg-type]


def test_a_table_of_the_file_says_what_one_model_has_its_own(file: Any) -> None:
    path = file(
        'policy = "prefix"\n'
        '[models."Qwen/Qwen3-VL-8B"]\npolicy = "least_load"\n'
        '[models.small]\nprefix_credit = 0\nspill_wait = "500ms"\n'
    )
    settings = load({}, path)
    assert settings.policy == "prefix"
    assert policy_overrides(settings) == {
        "Qwen/Qwen3-VL-8B": PolicyOverride(policy="least_load"),
        "small": PolicyOverride(prefix_credit=0, spill_wait=0.5),
    }


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("color = 1", "models.A/b.color"),
        ('policy = "fastest"', "models.A/b.policy"),
        ("prefix_credit = -1", "models.A/b.prefix_credit"),
        ("hash_load_factor = 0.5", "models.A/b.hash_load_factor"),
        ("prefix_credit = nan", "models.A/b.prefix_credit"),
    ],
)
def test_a_mistake_in_a_models_table_is_named(file: Any, table: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: "):
        load({}, file(f'[models."A/b"]\n{table}\n'))


def test_what_no_model_has_its_own_is_an_unknown_key(file: Any) -> None:
    with pytest.raises(ConfigError, match=r"^models\.small\.listen: unknown key$"):
        load({}, file('[models.small]\nlisten = "127.0.0.1:1"\n'))


@pytest.mark.parametrize(
    "name",
    ["example.org", ".example.org", "Media.Example.org.", "localhost", "10.0.0.1", "fd00::1"],
)
def test_a_domain_that_media_may_come_from(name: str) -> None:
    assert load({"media_allowed_domains": f"cdn.example,{name}"}).media_allowed_domains[1] == name


@pytest.mark.parametrize(
    "name",
    [
        "https://example.org",
        "example.org/media",
        "example.org:8443",
        "*.example.org",
        "b\u00fc.org",
    ],
)
def test_what_is_the_domain_of_no_host_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^media_allowed_domains: not a domain: "):
        load({"media_allowed_domains": name})


@pytest.mark.parametrize("color", ["red", "#fff", "#12345g", "white\n"])
def test_what_is_no_background_is_told_how_one_is_written(color: str) -> None:
    with pytest.raises(ConfigError, match=r"^media_background: not a background: .*#RRGGBB"):
        load({"media_background": color})
