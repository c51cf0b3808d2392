import base64
import io
import json
import zipfile
from pathlib import Path

import grpc
import pytest

from router.cli import run
from router.wire import common, engine
from tests.cli.servers import Engine, Failure, archive, chunk, complete, serving
from workers.sim.bundle import pack
from workers.sim.tokenizer import IM_END, IMAGE_PAD, VIDEO_PAD

PNG = b"\x89PNG\r\n\x1a\n rest"
JPEG = b"\xff\xd8\xff rest"


def ask(server: Engine, *args: str) -> int:
    with serving(server) as address:
        return run(["generate", "--addr", address, *args])


@pytest.fixture
def picture(tmp_path: Path) -> str:
    path = tmp_path / "picture.jpg"
    path.write_bytes(PNG)
    return str(path)


def test_text_is_printed_and_special_tokens_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    server = Engine([chunk(b"gr"), chunk([*"üß".encode(), IM_END]), complete([IM_END])])
    assert ask(server, "hello") == 0
    assert capsys.readouterr().out == "grüß\n"


def test_the_prompt_is_rendered_and_encoded(capsys: pytest.CaptureFixture[str]) -> None:
    server = Engine([complete(b"ok")])
    assert ask(server, "--system", "be brief", "hello") == 0
    request = server.requests[0]
    text = request.tokenized.original_text
    assert "be brief" in text
    assert text.index("be brief") < text.index("hello")
    assert request.tokenized.input_ids[0] > 255, "the template's special token is one id"
    assert not request.HasField("media_refs")
    assert request.stream
    assert request.request_id


def test_one_anchor_and_one_reference_for_each_picture_in_order(picture: str) -> None:
    server = Engine([complete(b"ok")])
    url = "https://example.org/a.mp4?x=%20"
    assert ask(server, "--image", picture, "--video", url, "--image", picture, "what?") == 0
    request = server.requests[0]
    anchors = [i for i in request.tokenized.input_ids if i in (IMAGE_PAD, VIDEO_PAD)]
    assert anchors == [IMAGE_PAD, VIDEO_PAD, IMAGE_PAD]
    items = request.media_refs.items
    assert [item.modality for item in items] == [common.IMAGE, common.VIDEO, common.IMAGE]
    assert items[0].url == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert items[1].url == url
    assert not any(item.HasField("hints") for item in items)


def test_inline_sends_the_bytes_themselves(picture: str) -> None:
    server = Engine([complete(b"ok")])
    assert ask(server, "--inline", "--image", picture, "what?") == 0
    (item,) = server.requests[0].media_refs.items
    assert (item.data, item.url) == (PNG, "")


def test_hints_go_to_the_items_they_fit(picture: str) -> None:
    server = Engine([complete(b"ok")])
    hints = ["--max-long-side", "512", "--fps", "0.5"]
    assert ask(server, *hints, "--image", picture, "--video", "http://h/v.mp4", "what?") == 0
    image, video = server.requests[0].media_refs.items
    assert image.hints == engine.MediaHints(max_long_side_pixels=512)
    assert video.hints == engine.MediaHints(max_long_side_pixels=512, fps=0.5)


def test_options_reach_the_request() -> None:
    server = Engine([complete(b"ok")])
    sampling = ["--max-tokens", "5", "--temperature", "0", "--seed", "3", "--n", "1"]
    routing = ["--model", "m", "--mm-processing", "worker", "--routing-key", "k"]
    assert ask(server, *sampling, *routing, "--no-stream", "hello") == 0
    request = server.requests[0]
    params = request.sampling_params
    assert (params.max_tokens, params.temperature, params.seed, params.n) == (5, 0.0, 3, 1)
    assert params.HasField("temperature")
    assert request.router == engine.RouterOptions(
        model="m", mm_processing=engine.MmProcessing.WORKER, routing_key="k"
    )
    assert not request.stream
    assert server.asked == ["m", "m"], "name and tokenizer are those of the same model"


def test_what_was_not_chosen_is_left_to_the_worker() -> None:
    server = Engine([complete(b"ok")])
    assert ask(server, "hello") == 0
    params = server.requests[0].sampling_params
    assert not params.HasField("temperature")
    assert not params.HasField("seed")


def test_json_tells_where_the_request_went(capsys: pytest.CaptureFixture[str]) -> None:
    trailers = [("mmrouter-worker", "10.0.0.1:1"), ("mmrouter-mode", "router"), ("other", "x")]
    server = Engine([chunk(b"a"), chunk(b"b"), complete(b"b")], trailers=trailers)
    assert ask(server, "--json", "hello") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {
        "request_id": server.requests[0].request_id,
        "model": "served",
        "text": "ab",
        "ids": list(b"ab"),
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 7, "cached_tokens": 0, "completion_tokens": 2},
        "route": {"worker": "10.0.0.1:1", "mode": "router"},
    }


def test_ids_of_a_stream_are_those_of_its_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    for last in (b"b", b"ab"):  # workers repeat the last chunk's ids at the end, or all of them
        server = Engine([chunk(b"a"), chunk(b"b"), complete(last)])
        assert ask(server, "--json", "hello") == 0
        assert json.loads(capsys.readouterr().out)["ids"] == list(b"ab")


def test_interleaved_choices_are_kept_apart(capsys: pytest.CaptureFixture[str]) -> None:
    responses = [chunk(b"a", 0), chunk(b"x", 1), chunk(b"b", 0), complete(b"x", 1), complete(b"b")]
    assert ask(Engine(responses), "--n", "2", "hello") == 0
    assert capsys.readouterr().out == "[0] ab\n[1] x\n"
    assert ask(Engine(responses), "--n", "2", "--json", "hello") == 0
    printed = json.loads(capsys.readouterr().out)
    assert [choice["text"] for choice in printed["choices"]] == ["ab", "x"]
    assert printed["usage"]["completion_tokens"] == 3


def test_an_error_is_one_line_with_reason_and_retry_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failure = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", "all are busy", 1.5)
    assert ask(Engine(failure=failure), "hello") == 1
    assert capsys.readouterr().err == "error: OVERLOADED: all are busy (retry in 1.5s)\n"


def test_an_error_after_text_begins_on_its_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(grpc.StatusCode.UNAVAILABLE, "WORKER_STREAM_BROKEN", "it broke")
    assert ask(Engine([chunk(b"half")], failure=failure), "hello") == 1
    printed = capsys.readouterr()
    assert printed.out == "half\n"
    assert printed.err == "error: WORKER_STREAM_BROKEN: it broke\n"


def test_a_missing_file_is_said_and_nothing_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    server = Engine()
    assert ask(server, "--image", "/nonexistent.jpg", "hello") == 1
    assert "cannot read /nonexistent.jpg" in capsys.readouterr().err
    assert server.requests == []


def test_an_empty_name_of_a_picture_is_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(Engine(), "--image", "", "hello") == 1
    assert capsys.readouterr().err == "error: --image names no file and no URL\n"


def test_a_number_out_of_range_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(Engine(), "--max-tokens", "-1", "hello") == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_an_address_that_is_none_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--addr", "nowhere", "hello"]) == 2
    assert "not an address" in capsys.readouterr().err


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name, content in members.items():
            bundle.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("bundle", "sha256", "said"),
    [
        (b"not a zip", None, "damaged"),
        (archive(), "0" * 64, "sha256"),
        (zipped(**{"../tokenizer.json": b"{}"}), None, "outside"),
        (pack({"chat_template.jinja": b"x"}), None, "tokenizer.json"),
        (pack({"chat_template.jinja": b"x", "tokenizer.json": b"{}"}), None, "cannot be used"),
        (pack({"tokenizer.json": b"{}"}), None, "no chat template"),
    ],
)
def test_a_bad_bundle_is_refused(
    bundle: bytes, sha256: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(Engine(bundle=bundle, sha256=sha256), "hello") == 1
    assert said in capsys.readouterr().err
