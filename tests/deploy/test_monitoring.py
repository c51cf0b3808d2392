"""Alerts and dashboard speak of metrics that exist, and every alert says what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from router import config
from router.app import App
from router.observe.metrics import Metrics
from router.prefix.gauges import prefix_gauges

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs/operations.md").read_text()
RULES = yaml.safe_load((ROOT / "deploy/kubernetes/monitoring/prometheusrule.yaml").read_text())
DASHBOARD = json.loads((ROOT / "deploy/grafana/mmrouter.json").read_text())
ALERTS = [rule for group in RULES["spec"]["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
NAME = re.compile(r"\b(?:router|process|python)_[a-z0-9_]+\b")

SUFFIXES = {
    "counter": ["_total"],
    "histogram": ["_bucket", "_sum", "_count"],
    "info": ["_info"],
    "gauge": [""],
}

needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool (Debian: prometheus) is missing"
)


def names(metrics: Metrics) -> Iterator[str]:
    for family in metrics.registry.collect():
        for suffix in SUFFIXES[family.type]:
            yield family.name + suffix


@pytest.fixture(scope="module")
def existing() -> set[str]:
    """The names of all series that a router can have."""
    prefixes = Metrics()
    prefixes.show(prefix_gauges(list, list, list))
    return {*names(App(config.load({"http": ""})).metrics), *names(prefixes)}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_an_alert_asks_for_metrics_that_exist_and_has_a_paragraph(
    alert: dict[str, Any], existing: set[str]
) -> None:
    assert set(NAME.findall(alert["expr"])) <= existing
    name = alert["alert"]
    told = alert["annotations"]
    assert told["runbook"] == f"docs/operations.md#{name.lower()}"
    assert told["summary"] and told["description"]
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    (paragraph,) = re.findall(rf"^### {name}\n\n(.+)\n", OPERATIONS, re.M)
    assert len(paragraph) > 100


def test_every_paragraph_is_of_an_alert() -> None:
    _, alerts = OPERATIONS.split("\n## Alerts\n")
    headings = re.findall(r"^### (\w+)$", alerts.split("\n## ")[0], re.M)
    assert headings == [alert["alert"] for alert in ALERTS]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_a_panel_asks_for_metrics_that_exist(panel: dict[str, Any], existing: set[str]) -> None:
    assert panel["description"] and panel["targets"]
    for target in panel["targets"]:
        assert set(NAME.findall(target["expr"])) <= existing


def test_panels_neither_overlap_nor_leave_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_the_metrics_in_the_documentation_exist(existing: set[str]) -> None:
    named = {name for name in NAME.findall(OPERATIONS) if name.startswith("router_")}
    # A histogram is named without its suffixes.
    known = existing | {name.removesuffix("_bucket") for name in existing}
    # What the supervisor of several processes adds.
    for file in (ROOT / "router/supervise").glob("*.py"):
        known |= set(NAME.findall(file.read_text()))
        known |= {f"{name}_total" for name in NAME.findall(file.read_text())}
    assert named - known - {"router_"} == set()


def test_every_metric_of_ours_is_in_the_documentation(existing: set[str]) -> None:
    ours = {n.removesuffix("_bucket") for n in existing if n.startswith("router_")}
    ours = {n for n in ours if not n.endswith(("_sum", "_count"))}
    assert ours - set(NAME.findall(OPERATIONS)) == set()


# -- With Prometheus' own tools


def promtool(folder: Path, *arguments: str) -> str:
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": RULES["spec"]["groups"]}))
    done = subprocess.run(
        ["promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_the_rules_are_valid(tmp_path: Path) -> None:
    assert f"{len(ALERTS)} rules found" in promtool(tmp_path, "check", "rules", "rules.yml")


@needs_promtool
def test_every_expression_of_the_dashboard_is_valid(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{panel['id']}:{target['refId']}", "expr": expression}
        for panel in PANELS
        for target in panel["targets"]
        for expression in [
            re.sub(r"\$__rate_interval", "5m", target["expr"]).replace("$", "")  # variables
        ]
    ]
    (tmp_path / "panels.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]})
    )
    assert f"{len(rules)} rules found" in promtool(tmp_path, "check", "rules", "panels.yml")


READY = 'router_worker_state{instance="r",worker="w",state="ready"}'
BUILD = 'router_build_info{instance="r",version="1"}'
OK = 'router_requests_total{model="m",outcome="ok",reason=""}'
FAILED = 'router_requests_total{model="m",outcome="worker_failed",reason="leg_failed"}'
SHED = 'router_requests_total{model="m",outcome="overloaded",reason="overloaded"}'
TOKENS = 'router_retry_budget_tokens{instance="r"}'
CAPACITY = 'router_retry_budget_capacity{instance="r"}'
LAG = 'router_loop_lag_seconds_bucket{instance="r",le="%s"}'
AGE = 'router_worker_load_age_seconds{instance="r",worker="w"}'


@needs_promtool
@pytest.mark.parametrize(
    ("alert", "series", "fires"),
    [
        ("MmrouterDown", {}, True),
        ("MmrouterDown", {BUILD: "1x60"}, False),
        ("MmrouterNoReadyWorker", {BUILD: "1x60", READY: "0x60"}, True),
        ("MmrouterNoReadyWorker", {BUILD: "1x60"}, True),
        ("MmrouterNoReadyWorker", {BUILD: "1x60", READY: "1x60"}, False),
        ("MmrouterRequestsFail", {OK: "0+90x60", FAILED: "0+10x60"}, True),
        ("MmrouterRequestsFail", {OK: "0+99x60", FAILED: "0+1x60"}, False),
        ("MmrouterOverloaded", {OK: "0+90x60", SHED: "0+10x60"}, True),
        ("MmrouterOverloaded", {OK: "0+99x60", SHED: "0+1x60"}, False),
        ("MmrouterRetryBudgetSpent", {TOKENS: "20x60", CAPACITY: "40x60"}, True),
        ("MmrouterRetryBudgetSpent", {TOKENS: "21x60", CAPACITY: "40x60"}, False),
        ("MmrouterRetryBudgetSpent", {TOKENS: "0x60", CAPACITY: "0x60"}, False),
        ("MmrouterEventLoopLags", {LAG % "0.01": "0+9x60", LAG % "0.25": "0+10x60"}, True),
        ("MmrouterLoadUnknown", {AGE: "0+60x60", READY: "1x60"}, True),
        ("MmrouterLoadUnknown", {AGE: "0+60x60", READY: "0x60"}, False),
    ],
)
def test_an_alert_fires_when_it_should(
    alert: str, series: dict[str, str], fires: bool, tmp_path: Path
) -> None:
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    if (LAG % "0.25") in series:
        inputs.append({"series": LAG % "+Inf", "values": "0+10x60"})
    # Whether it fires, whatever its labels: alerts are series too.
    asked = {
        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)',
        "eval_time": "45m",
        "exp_samples": [{"labels": "{}", "value": int(fires)}],
    }
    test = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": [asked]}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    promtool(tmp_path, "test", "rules", "test.yml")
