import asyncio
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
import pytest

from router.observe.history import History, Trend
from router.observe.plot import short, sparkline
from router.observe.recent import RecentFailures
from router.observe.statusz import Status, ago, page
from tests.observe.pages import CHROMIUM, EMPTY, browse, large, worker
from tests.serving import MODEL, PICTURE, data_url, eventually, seeing, serving, tokenized
from workers.sim import SimOptions

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian: chromium) is missing")


class Outline(HTMLParser):
    """Texts of cells, targets of links, and that every element is closed."""

    VOID = ("meta",)

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.loads: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")
        if tag in ("script", "link", "img", "iframe"):
            self.loads.append(tag)
        self.loads += [f"{k}={v}" for k, v in attrs if k in ("src", "onload", "onclick")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            self.cells[-1] += data


@pytest.mark.parametrize("status", [EMPTY, large(1), large(60)])
def test_a_page_is_whole_and_loads_nothing(status: Status) -> None:
    html = page(status)
    outline = Outline(html)
    assert outline.loads == []
    assert "//" not in html.replace("http://", "").replace("https://", "")
    assert "url(" not in html


def test_every_state_is_a_word() -> None:
    html = page(large())
    cells = " ".join(Outline(html).cells)
    for word in ("ready", "pending", "unhealthy", "draining", "closed", "open", "half open"):
        assert word in cells
    assert "<b>ready</b>" in html
    assert "<b>not ready</b> <span>no worker is ready</span>" in page(EMPTY)


def test_workers_in_trouble_come_first() -> None:
    states = re.findall(r'<b class="word (ready|pending|unhealthy|draining)">', page(large()))
    assert states == sorted(states, key=["unhealthy", "pending", "draining", "ready"].index)


def test_what_a_worker_did_not_report_is_not_shown_as_zero() -> None:
    pending = next(w for w in map(worker, range(100)) if w.state == "pending")
    cells = Outline(page(Status(0.0, None, workers=[pending]))).cells
    assert cells[4].endswith("no report")
    assert cells[2] == cells[3] == "–"


def test_text_from_outside_is_text() -> None:
    failures = RecentFailures(clock=lambda: 0.0)
    failures.add("<b>m", "client_fault", "x", "<script>alert(1)</script>", '"><img src=x>')
    html = page(Status(0.0, "<i>", failures=failures.latest_first()))
    assert Outline(html).loads == []
    assert "<script" not in html and "<i>" not in html


def test_kinds_of_failures_are_counted_and_the_oldest_forgotten() -> None:
    now = [0.0]
    failures = RecentFailures(kinds=2, clock=lambda: now[0])
    for at, reason in enumerate(["a", "b", "a", "c"]):
        now[0] = at
        failures.add("m", "internal", reason, f"{reason} failed", str(at))
    told = [(f.reason, f.count, f.last_at, f.request_id) for f in failures.latest_first()]
    assert told == [("c", 1, 3, "3"), ("a", 2, 2, "2")]


def test_a_history_keeps_rates_of_what_grows_and_values_of_the_rest() -> None:
    grown, level = [10.0], [3.0]
    history = History(
        [Trend("a", lambda: grown[0], rate=True), Trend("b", lambda: level[0])], length=2
    )
    for add in (5, 0, 20):
        grown[0] += add
        level[0] += 1
        history.sample(2.0)
    assert history.series() == [("a", [0.0, 10.0]), ("b", [5.0, 6.0])]


def test_a_plot_begins_at_zero_and_ends_at_the_right_edge() -> None:
    svg = sparkline("a", [0, 5, 10], 5)
    (points,) = re.findall(r'<polyline class="line" points="([^"]+)"', svg)
    assert points == "120.0,46.0 180.0,24.0 240.0,2.0"
    assert "nan" not in sparkline("a", [0.0], 1) + sparkline("a", [], 0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (3, "3"), (42.4, "42"), (1500, "1.5k"), (3.2e6, "3.2M")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (119, "119s"), (150, "2m"), (9e4, "25h")]
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert ago(seconds) == text


async def fetch(url: str) -> tuple[str, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200
        return await answer.text(), answer.headers["Content-Security-Policy"]


async def test_a_router_shows_its_fleet_modes_errors_and_caches() -> None:
    async with serving(SimOptions(), http="127.0.0.1:0", mm_processing="router") as served:
        await served.generate(seeing(f"{PICTURE} what?", data_url("rgba_203x151.png")))
        await served.refusal(tokenized("who?"), [("x-model", "nobody's")])
        await served.at_rest()
        # A report may be of the moment when the request was running.
        await eventually(lambda: (r := served.worker().load.reported) and r.running == 0)
        html, policy = await fetch(f"http://{served.app.http}/statusz")
        address = served.workers[0].address
    cells = Outline(html).cells
    assert cells[0] == address
    assert cells[1].startswith("ready for ")
    assert "0 running, 0 waiting, KV " in cells[4]
    assert cells[6:11] == [MODEL, "image", "router", "config", "router (config) 1"]
    assert cells[11] == "client_faultmodel_not_found"
    assert "0 of 1 found (0%)" in html
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


async def test_a_router_without_workers_says_so() -> None:
    async with serving(http="127.0.0.1:0") as served:
        html, _ = await fetch(f"http://{served.app.http}/statusz")
    assert "No worker is registered." in html and "not ready" in html


# -- In a browser

_MEASURE = """<title></title><script>
onload = () => {
  document.title = [...document.querySelectorAll('iframe')].map(frame => {
    const page = frame.contentDocument, width = frame.contentWindow.innerWidth;
    const wide = [...page.querySelectorAll('body *')].filter(
      e => e.getBoundingClientRect().right > width + 1);
    return `${width} ${page.documentElement.scrollWidth - width} ${wide.length}`;
  }).join(', ');
};
</script>"""


@in_browser
def test_nothing_sticks_out_of_a_window_however_narrow(tmp_path: Path) -> None:
    widths = (320, 360, 500, 800, 1280)
    frames = [
        f'<iframe width="{width}" height="900" frameborder="0" scrolling="no" '
        f'srcdoc="{escape(page(status))}"></iframe>'
        for width in widths
        for status in (EMPTY, large(60))
    ]
    file = tmp_path / "page.html"
    file.write_text(_MEASURE + "".join(frames))
    dom = browse(f"file://{file}", tmp_path, "--virtual-time-budget=3000", "--dump-dom")
    (told,) = re.findall(r"<title>([^<]+)</title>", dom.partition("<iframe")[0])
    assert told == ", ".join(f"{width} 0 0" for width in widths for _ in range(2))


@in_browser
@pytest.mark.slow
async def test_a_browser_opens_the_router_s_page(tmp_path: Path) -> None:
    async with serving(SimOptions(), http="127.0.0.1:0") as served:
        url = f"http://{served.app.http}/statusz"
        dom = await asyncio.to_thread(browse, url, tmp_path, "--dump-dom")
        assert served.workers[0].address in dom
    assert "<title>mmrouter: ready</title>" in dom


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["360,1600", "1280,1000"])
@pytest.mark.parametrize("status", [EMPTY, large(60)], ids=["empty", "60 workers"])
def test_screenshots_show_something(status: Status, size: str, scheme: str, tmp_path: Path) -> None:
    file, shot = tmp_path / "page.html", tmp_path / "shot.png"
    file.write_text(page(status))
    preferred = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    browse(f"file://{file}", tmp_path, preferred, f"--window-size={size}", f"--screenshot={shot}")
    import cv2

    pixels = cv2.imread(str(shot), cv2.IMREAD_GRAYSCALE)
    width, height = map(int, size.split(","))
    assert pixels.shape == (height, width)
    # The background is what most of the page is, and text stands out from it.
    background = float(sorted(pixels.ravel())[pixels.size // 2])
    assert (background > 200) == (scheme == "light")
    assert abs(pixels.astype(float) - background).max() > 150
