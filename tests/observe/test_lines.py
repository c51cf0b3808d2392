import io
import json
import os
import threading
from collections.abc import Iterator

import pytest

from router.observe.lines import Lines

LINE = "x" * 999 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its reading and its writing end."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_lines_arrive_in_order(pipe: tuple[int, int]) -> None:
    lines = Lines(pipe[1])
    for number in range(1000):
        lines.write(f"{number}\n")
    lines.drain(30)
    assert os.read(pipe[0], 1 << 16).split() == [str(n).encode() for n in range(1000)]
    assert lines.lost == 0


def test_a_reader_that_stands_still_holds_nobody_up_and_hears_what_it_has_missed(
    pipe: tuple[int, int], logged: io.StringIO
) -> None:
    reader, writer = pipe
    lines = Lines(writer, most=10)
    for _ in range(500):  # a pipe holds 64 KiB
        lines.write(LINE)
    assert 400 < lines.lost < 500
    lines.drain(0.01)  # gives up
    lost, arrived = lines.lost, b""
    whole = (500 - lost) * len(LINE)
    while len(arrived) < whole:
        arrived += os.read(reader, 1 << 16)
    assert arrived == LINE.encode() * (500 - lost)
    lines.drain(30)
    (told,) = [json.loads(line) for line in logged.getvalue().splitlines()]
    assert (told["event"], told["lines"]) == ("log_lines_lost", lost)


def test_a_full_disk_loses_lines_and_fails_nobody() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        lines = Lines(full)
        assert lines.write("one\n") == 4
        lines.write("two\n")
        lines.drain(30)
        assert lines.lost == 2
    finally:
        os.close(full)


def test_a_descriptor_that_somebody_made_non_blocking_loses_nothing(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.set_blocking(writer, False)
    lines = Lines(writer)
    for _ in range(500):
        lines.write(LINE)
    arrived = b""
    while len(arrived) < 500 * len(LINE):
        arrived += os.read(reader, 1 << 16)
    assert arrived == LINE.encode() * 500
    assert lines.lost == 0


def test_what_cannot_be_encoded_is_written_escaped(pipe: tuple[int, int]) -> None:
    lines = Lines(pipe[1])
    lines.write("\ud800ж\n")
    lines.drain(30)
    assert os.read(pipe[0], 100) == b"\\ud800" + "ж\n".encode()


def test_any_thread_may_write(pipe: tuple[int, int]) -> None:
    lines = Lines(pipe[1])
    threads = [threading.Thread(target=lines.write, args=(f"{n}\n",)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.drain(30)
    assert sorted(os.read(pipe[0], 1000).split()) == sorted(str(n).encode() for n in range(20))
