"""Status pages to look at, and a browser that looks."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

from router.observe.recent import Failure
from router.observe.statusz import ModeRow, Status, WorkerRow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MODEL = "Qwen/Qwen3-VL-30B-A3B-Instruct"
FACTS = (
    *(("version", "0.1.0"), ("up for", "3h"), ("at work", "112 of 1024")),
    *(("waiting", "0 of 256"), ("policy", "least_load"), ("media", "auto")),
)
TITLES = ("requests/s", "errors/s", "at work", "waiting", "tokens/s", "media B/s")
REASONS = {
    "ready": "metadata read and serving",
    "pending": "metadata: UNAVAILABLE: failed to connect to all addresses; last error: "
    "UNKNOWN: ipv4:10.0.3.7:50051: Failed to connect to remote host: Connection refused",
    "unhealthy": "suspected: no answer for 4.2s with requests there",
    "draining": "drained by command",
}
EMPTY = Status(0.0, "no worker is ready", FACTS, series=[(title, []) for title in TITLES])


def worker(number: int) -> WorkerRow:
    rng = random.Random(number)
    state = rng.choice([*["ready"] * 5, "pending", "unhealthy", "draining"])
    known = state != "pending"
    return WorkerRow(
        address=f"10.0.{number // 250}.{number % 250}:50051",
        state=state,
        reason=REASONS[state],
        since=rng.random() * 9000,
        model=MODEL if known else "",
        role=rng.choice(["both", "prefill", "decode"]),
        media=rng.choice(["references (data, http, https)", "raw pixels"]) if known else "",
        in_flight=rng.randrange(40),
        running=rng.randrange(40) if known else None,
        waiting=rng.randrange(9) if known else None,
        kv_usage=rng.random() if known else None,
        load_age=rng.random() if known else None,
        breaker=rng.choice(["closed", "closed", "open", "half_open"]),
    )


def large(workers: int = 60) -> Status:
    """A fleet with all kinds of trouble."""
    rng = random.Random(1)
    plots = [(title, [rng.random() * 10**i for _ in range(120)]) for i, title in enumerate(TITLES)]
    return Status(
        now=10_000.0,
        not_ready=None,
        facts=FACTS,
        workers=[worker(n) for n in range(workers)],
        modes=[ModeRow(MODEL, "image", "worker", "auto_uniform", "worker (auto_uniform) 1033")],
        failures=[
            Failure(
                MODEL,
                "client_fault",
                "media_not_found",
                12,
                9_990.0,
                "media item 0: the host answered 404",
                "8d571c9a0e064bb2b48b110596f8d7fd",
            )
        ],
        caches=[("downloads", "812 of 1033 found (79%)"), ("kept", "212MiB in 319 entries")],
        series=plots,
    )


def browse(page: str, folder: Path, *options: str) -> str:
    """What headless Chromium says on stdout when it opens a page with these options."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            f"--user-data-dir={folder / 'profile'}",
            *options,
            page,
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return done.stdout
