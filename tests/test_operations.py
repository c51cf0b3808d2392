"""docs/operations.md tells of every event and metric there is, and of no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from router import config
from router.app import App
from router.supervise.processes import Processes

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "operations.md").read_text()
LEVELS = {"info", "warning", "error"}


def section(title: str) -> str:
    return re.split(r"^## ", TEXT.split(f"## {title}\n")[1], flags=re.M)[0]


def first_column(title: str) -> set[str]:
    rows = re.findall(r"^\| (`.+?) \|", section(title), re.M)
    return {name for row in rows for name in re.findall(r"`([a-z_]+)", row)}


def events(levels: set[str] = LEVELS) -> set[str]:
    """The first arguments of all calls of a module's logger, or of one that it was given."""
    found = set()
    for file in (ROOT / "router").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in ("_log", "log")
                and node.func.attr in levels
                and isinstance(node.args[0], ast.Constant)
                and str(node.args[0].value).isidentifier()
            ):
                found.add(str(node.args[0].value))
    # Logged by way of a variable, whose level depends on the state.
    return found | {"worker_state"}


def test_every_event_is_explained() -> None:
    told = first_column("Log lines")
    assert events() <= told
    # Of debug lines some are worth a word.
    assert told <= events({*LEVELS, "debug"})


async def test_every_metric_is_explained() -> None:
    app = App(config.load({"listen": "127.0.0.1:0", "http": ""}))
    suffixes = {"counter": "_total", "info": "_info"}
    there = {
        metric.name + suffixes.get(metric.type, "")
        for registry in (app.metrics.registry, Processes(2).registry)
        for metric in registry.collect()
        if metric.name.startswith("router_")
    }
    told = {n for n in re.findall(r"`(router_[a-z_]+)", section("Metrics")) if n != "router_"}
    assert told == there


def test_every_flag_that_is_named_exists() -> None:
    flags = {f"--{name.replace('_', '-')}" for name in config.Settings.model_fields}
    named = {f"--{name}" for name in re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z-]+)", TEXT)}
    # Those of `health` and `explain`.
    assert named <= flags | {"--addr", "--service", "--admin-addr", "--admin-token-file"}
