"""What the documentation says in tables is what the code does."""

import re
from pathlib import Path

import grpc
import pytest

from router.cli import COMMANDS
from router.config import Settings, load
from router.faults import Reason
from router.request.resolve import Why
from router.rpc.errors import TABLE
from router.wire import engine
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub
from tests.cli.servers import Engine, Failure, complete, serving
from workers.sim.tokenizer import IMAGE_PAD

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))]
ERROR_ROW = re.compile(r"^\| `([A-Z_]+)` \| ([A-Z_]+)(, retry)? \|", re.M)


def test_every_reason_is_documented_once_with_its_status_and_retry_hint() -> None:
    rows = ERROR_ROW.findall((ROOT / "docs/errors.md").read_text())
    documented = {name: (status, bool(retry)) for name, status, retry in rows}
    assert len(rows) == len(documented)
    assert documented == {
        reason.value: (TABLE[reason].code.name, TABLE[reason].retry_after is not None)
        for reason in Reason
    }


def test_the_example_of_reading_an_error_reads_one(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/errors.md").read_text(), re.S)
    failure = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", "all are busy", 1.5)
    with serving(Engine(failure=failure)) as address, grpc.insecure_channel(address) as channel:
        exec(example, {"stub": VllmEngineStub(channel), "request": engine.GenerateRequest()})
    assert capsys.readouterr().out == "OVERLOADED all are busy\nagain in 0:00:01.500000\n"


def test_the_example_of_a_client_sends_a_photo_and_prints_the_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    monkeypatch.chdir(ROOT)
    server = Engine([complete(b"a cup")])
    with serving(server) as address:
        exec(example.replace("127.0.0.1:50050", address), {})
    assert capsys.readouterr().out == "a cup\n"
    (request,) = server.requests
    assert request.media_refs.items[0].url.startswith("data:image/jpeg;base64,/9j/")
    assert list(request.tokenized.input_ids).count(IMAGE_PAD) == 1


def test_the_defaults_in_the_readme_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| `([^`]+)` \|", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) > 8
    for flag, told in rows:
        field = flag.replace("-", "_")
        assert getattr(load({field: told}), field) == Settings.model_fields[field].default, flag


def test_the_commands_in_the_readme_are_all_there_are() -> None:
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"^\| `mmrouter ([\w-]+)` \|", text, re.M)) == COMMANDS.keys()


def test_every_reason_of_a_mode_is_documented() -> None:
    _, table = (ROOT / "docs/wire.md").read_text().split("| mode | reason | when |")
    rows = re.findall(r"^\| [^|]+ \| `([a-z_]+)` \|", table, re.M)
    assert sorted(rows) == sorted(why.value for why in Why)


@pytest.mark.parametrize("page", PAGES)
def test_every_serve_flag_named_in_the_documentation_exists(page: str) -> None:
    flags = {f"--{name.replace('_', '-')}" for name in Settings.model_fields} | {
        "--config",
        "--help",
    }
    text = (ROOT / page).read_text()
    served = re.findall(r"mmrouter serve[^`\n]*(?:\\\n[^`\n]*)*", text)
    named = {flag for line in served for flag in re.findall(r"--[a-z][a-z-]+", line)}
    if page == "README.md":  # its table is of serve's flags
        named |= set(re.findall(r"^\| `(--[a-z][a-z-]+)", text, re.M))
    assert named <= flags


@pytest.mark.parametrize("page", PAGES)
def test_links_within_the_repository_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
