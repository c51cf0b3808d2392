"""A real Prometheus scrapes a router, with our alerts loaded."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.serving import MODEL, Serving, eventually, serving, tokenized
from workers.sim import SimOptions

RULES = Path(__file__).parents[2] / "deploy/kubernetes/monitoring/prometheusrule.yaml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which("prometheus"), reason="prometheus (Debian: prometheus) is missing"
    ),
]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Prometheus:
    """One that scrapes a single target every 200 ms."""

    def __init__(self, session: aiohttp.ClientSession, base: str) -> None:
        self._session = session
        self._base = base

    async def get(self, path: str, **params: str) -> Any:
        async with self._session.get(f"{self._base}/api/v1/{path}", params=params) as answer:
            told = await answer.json()
        assert told["status"] == "success", told
        return told["data"]

    async def value(self, expression: str) -> float | None:
        """Of the only series; None while there is none."""
        found = (await self.get("query", query=expression))["result"]
        assert len(found) < 2
        return float(found[0]["value"][1]) if found else None

    async def until(self, expression: str, wanted: float) -> None:
        async with asyncio.timeout(60):
            while await self.value(expression) != wanted:  # noqa: ASYNC110 - it calls nobody
                await asyncio.sleep(0.1)


@asynccontextmanager
async def prometheus(target: str, folder: Path) -> AsyncIterator[Prometheus]:
    groups = yaml.safe_load(RULES.read_text())["spec"]["groups"]
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": groups}))
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "200ms", "evaluation_interval": "200ms"},
                "rule_files": ["rules.yml"],
                "scrape_configs": [
                    {"job_name": "mmrouter", "static_configs": [{"targets": [target]}]}
                ],
            }
        )
    )
    listen = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={listen}",
        "--log.level=error",
    )
    try:
        async with aiohttp.ClientSession() as session:
            async with asyncio.timeout(60):
                while not await answers(session, f"http://{listen}/-/ready"):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            yield Prometheus(session, f"http://{listen}")
    finally:
        process.terminate()
        await process.wait()


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientConnectionError:
        return False


async def ask(served: Serving, times: int) -> None:
    for _ in range(times):
        await served.generate(tokenized("hello", max_tokens=2))


async def test_prometheus_reads_what_happened_and_forgets_who_is_gone(tmp_path: Path) -> None:
    async with (
        serving(SimOptions(), SimOptions(), http="127.0.0.1:0") as served,
        prometheus(served.app.http, tmp_path) as scraper,
    ):
        await scraper.until("up", 1)
        await ask(served, 3)
        await scraper.until(f'router_requests_total{{outcome="ok",model="{MODEL}"}}', 3)
        await scraper.until("sum(router_worker_state{state='ready'})", 2)
        await scraper.until("sum(router_request_seconds_count)", 3)
        assert (await scraper.value("process_resident_memory_bytes") or 0) > 1e7
        gone = served.workers[0].address
        await served.app.fleet.remove(served.worker(0))
        await eventually(lambda: len(served.app.registry) == 1)
        # A series that is no longer exposed goes stale at once.
        await scraper.until("count(router_worker_info)", 1)
        assert await scraper.value(f'router_worker_in_flight{{worker="{gone}"}}') is None
        (target,) = (await scraper.get("targets"))["activeTargets"]
        assert target["health"] == "up" and target["lastError"] == ""


async def test_an_alert_fires_once_no_worker_is_left(tmp_path: Path) -> None:
    async with (
        serving(http="127.0.0.1:0") as served,
        prometheus(served.app.http, tmp_path) as scraper,
    ):
        name = "MmrouterNoReadyWorker"
        await scraper.until(f'count(ALERTS{{alertname="{name}"}})', 1)
        (group,) = (await scraper.get("rules"))["groups"]
        assert {rule["health"] for rule in group["rules"]} == {"ok"}
