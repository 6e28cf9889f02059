"""The HTML page in a real browser: drawn, right, sortable, silent, offline."""

from __future__ import annotations

import json
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dpbench.core.case import Case
from dpbench.instruments.logical.counter import logical_rows
from dpbench.results import outcome
from dpbench.results.kernels import OperatorCount
from dpbench.results.outcome import Outcome
from dpbench.results.run import Run
from dpbench.show.html.data import PageData, labelled
from dpbench.show.html.page import render

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

ROOT = Path(__file__).parents[3]
GRID1 = ROOT / "tests/data/saved/grid1.json"
COUNTED = ROOT / "tests/data/logical-1b-bs8-seq256.json"

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

HOSTILE = "</script><script>alert(1)</script>"

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--window-size=1280,900"),
)

MARKS = """
return Object.fromEntries([...document.querySelectorAll(".plot")].map((plot) => [plot.id, {
  bars: plot.querySelectorAll(".barlayer .point path").length,
  points: plot.querySelectorAll(".scatterlayer .points path").length,
  width: plot.querySelector(".main-svg").getBoundingClientRect().width,
  room: plot.getBoundingClientRect().width,
}]));
"""

CUT = """
return [...document.querySelectorAll(".plot")].flatMap((plot) => {
  const room = plot.getBoundingClientRect();
  const beyond = ({ left, right }) =>
    left < right && (left < room.left - 1 || right > room.right + 1);  // hidden text has no width
  return [...plot.querySelectorAll("text")]
    .filter((text) => beyond(text.getBoundingClientRect()))
    .map((text) => text.textContent);
});
"""

TABLE = """
const value = (cell) => cell.dataset.value ?? cell.textContent;
const table = document.getElementById(arguments[0]);
return {
  headers: [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim()),
  sorts: [...table.tHead.rows[0].cells].map((cell) => cell.getAttribute("aria-sort")),
  values: [...table.tBodies[0].rows].map((row) => [...row.cells].map(value)),
  texts: [...table.tBodies[0].rows].map((row) => [...row.cells].map((c) => c.textContent)),
};
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Headless Chromium that records its console and its requests."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    with webdriver.Chrome(options=options, service=service) as driver:
        driver.set_page_load_timeout(60)
        driver.set_script_timeout(60)
        yield driver


def show(browser: Chrome, path: Path, *documents: tuple[str, Any]) -> None:
    """Write a page of some documents, load it, and wait until it is drawn."""
    from selenium.webdriver.support.wait import WebDriverWait

    path.write_text(render(PageData(labelled(documents))), encoding="utf-8")
    for log in ("browser", "performance"):  # of the page before
        browser.get_log(log)
    browser.get(path.as_uri())
    drawn = "return document.documentElement.dataset.drawn"
    WebDriverWait(browser, 60, poll_frequency=0.05).until(lambda b: b.execute_script(drawn))


needs_browser = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs Chromium and its driver (chromium, chromedriver)"
)


@needs_browser
def test_page_is_drawn_and_right_in_a_browser(browser: Chrome, tmp_path: Path) -> None:
    grid1, counted = (Run.load(path).document for path in (GRID1, COUNTED))
    page = tmp_path / "report.html"
    show(browser, page, ("grid1", grid1), ("counted", counted))
    every_mark_is_there(browser)
    cases_are_means_of_their_rows(browser, grid1["rows"])
    phases_are_sums_of_their_rows(browser, grid1["rows"])
    headers_sort(browser)
    colours_change(browser)
    fits_a_phone(browser)
    nothing_was_said_or_fetched(browser, page)
    hostile = tmp_path / "hostile.html"
    hostile_text_stays_text(browser, hostile, grid1)
    fits_a_phone(browser)
    nothing_was_said_or_fetched(browser, hostile)


@needs_browser
def test_an_operator_that_grew_is_found_with_one_click(browser: Chrome, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    before, after = (counted(*more) for more in ((), (CLONE,)))
    page = tmp_path / "two.html"
    show(browser, page, ("before", before), ("after", after))
    browser.find_element(By.LINK_TEXT, "What changed").click()
    [line] = browser.find_elements(By.CSS_SELECTOR, "#table-grown-0 tbody tr")
    top = "return arguments[0].getBoundingClientRect().top"
    assert 0 <= browser.execute_script(top, line) < 900  # in sight
    for words in ("clip", "aten.clone", "blocks.*.up", "model.py:24 forward", "+500.0 MB"):
        assert words in line.text
    [flame, _] = browser.find_elements(By.CSS_SELECTOR, "#flames .plot")
    boxes = {each.text for each in flame.find_elements(By.CSS_SELECTOR, "text") if each.text}
    assert {"step", "forward", "blocks.*.up", "aten.mm", "model.py:20 forward"} <= boxes
    fits_a_phone(browser)
    nothing_was_said_or_fetched(browser, page)


def counted_at(line: int, name: str, phase: str, size: int) -> OperatorCount:
    place = "blocks.*.up", f"model.py:{line} forward"
    return OperatorCount(phase, name, 1, size, 0, 0, False, 0, *place)


MM = counted_at(20, "aten.mm", "forward", 3 * 10**9)
CLONE = counted_at(24, "aten.clone", "clip", 5 * 10**8)


def counted(*more: OperatorCount) -> dict[str, Any]:
    """The document of a step that was counted without hardware."""
    case, operators = Case("dpsgd", 8, 256), (MM, *more)
    rows = logical_rows(case, operators, dict.fromkeys((o.phase for o in operators), 0))
    rows_of_bytes = tuple(row for row in rows if "peak" not in row.metric)
    return outcome.document([Outcome(case, rows_of_bytes, operators=operators)], {})


def every_mark_is_there(browser: Chrome) -> None:
    figures = json.loads(
        browser.execute_script("return document.getElementById('figures').textContent")
    )
    marks = browser.execute_script(MARKS)
    assert len(marks) == 16
    assert set(marks) == set(filter(None, figures))
    for name, found in marks.items():
        expected = {"bars": 0, "points": 0}
        for trace in figures[name]["data"]:
            present = sum(value is not None for value in trace["x"])
            if trace["type"] == "bar":
                expected["bars"] += present
            elif "markers" in trace["mode"]:
                expected["points"] += present
        assert {kind: found[kind] for kind in expected} == expected, name
        assert sum(expected.values()) > 0, name
        assert 0 < found["width"] <= found["room"] + 1, name


def table(browser: Chrome, name: str) -> dict[str, Any]:
    found: dict[str, Any] = browser.execute_script(TABLE, name)
    return found


def cases_are_means_of_their_rows(browser: Chrome, rows: list[dict[str, Any]]) -> None:
    measured: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        if row["phase"] == "step":
            key = (row["trainer"], row["batch_size"], row["seq_len"], row["metric"])
            measured[key].append(row["value"])

    def expected(trainer: str, batch: int, seq: int) -> dict[str, float]:
        def of(metric: str) -> float:
            values = measured[trainer, batch, seq, metric]
            timed = metric in ("step_time_seconds", "samples_per_second")
            return statistics.median(values) if timed else statistics.fmean(values)

        return {
            "DRAM total, GB": of("dram_read_bytes") + of("dram_write_bytes"),
            "peak memory, GB": of("peak_memory_bytes"),
            "step ms": of("step_time_seconds"),
            "samples per s": of("samples_per_second"),
        }

    found = table(browser, "table-steps")
    lines = [dict(zip(found["headers"], cells, strict=True)) for cells in found["values"]]
    lines = [line for line in lines if line["basis"] == "measured"]
    assert len(lines) == 16
    for line in lines:
        cell = int(line["batch"]), int(line["sequence"])
        case, baseline = expected(line["trainer"], *cell), expected("standard", *cell)
        case["DRAM ÷ standard"] = case["DRAM total, GB"] / baseline["DRAM total, GB"]
        assert {name: float(line[name]) for name in case} == pytest.approx(case, rel=1e-12)
        assert {line[name] for name in line if name.startswith("logical")} == {""}


def phases_are_sums_of_their_rows(browser: Chrome, rows: list[dict[str, Any]]) -> None:
    total: dict[tuple[Any, ...], float] = defaultdict(float)
    for row in rows:
        if row["metric"] in ("dram_read_bytes", "dram_write_bytes"):
            total[row["trainer"], row["batch_size"], row["seq_len"], row["phase"]] += row["value"]
    found = table(browser, "table-phases")
    phases = [header.removesuffix(", GB") for header in found["headers"] if ", GB" in header]
    assert phases == ["forward", "backward", "clip", "noise", "optimizer", "step"]
    for cells, texts in zip(found["values"], found["texts"], strict=True):
        line = dict(zip(found["headers"], cells, strict=True))
        text = dict(zip(found["headers"], texts, strict=True))
        case = (line["trainer"], int(line["batch"]), int(line["sequence"]))
        for phase in phases:
            expected = total.get((*case, phase))
            if expected is None:
                assert text[f"{phase}, GB"] == "-"
            else:
                assert float(line[f"{phase}, GB"]) == pytest.approx(expected, rel=1e-12)
                shown = float(text[f"{phase}, GB"]) * 1e9
                assert shown == pytest.approx(expected, rel=6e-3)


def headers_sort(browser: Chrome) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    before = table(browser, "table-steps")
    place = before["headers"].index("DRAM total, GB")
    button = browser.find_elements(By.CSS_SELECTOR, "#table-steps th button")[place]
    button.click()
    up = table(browser, "table-steps")
    assert up["sorts"] == ["ascending" if at == place else "none" for at in range(len(up["sorts"]))]
    numbers = [float(cells[place]) for cells in up["values"] if cells[place]]
    assert numbers == sorted(numbers)
    assert [bool(cells[place]) for cells in up["values"]] == [True] * 16 + [False] * 4
    assert sorted(map(str, up["values"])) == sorted(map(str, before["values"]))
    button.send_keys(Keys.ENTER)
    down = table(browser, "table-steps")
    assert down["sorts"][place] == "descending"
    assert [float(cells[place]) for cells in down["values"][:16]] == numbers[::-1]
    names = before["headers"].index("trainer")
    browser.find_elements(By.CSS_SELECTOR, "#table-steps th button")[names].click()
    trainers = [cells[names] for cells in table(browser, "table-steps")["values"]]
    assert trainers == sorted(trainers)


def colours_change(browser: Chrome) -> None:
    from selenium.webdriver.common.by import By

    state = """
    const plot = document.querySelector(".plot .main-svg");
    return [getComputedStyle(document.body).backgroundColor, plot.style.background];
    """
    button = browser.find_element(By.ID, "theme")
    first = browser.execute_script(state)
    assert button.text == "Dark colours"
    button.click()
    second = browser.execute_script(state)
    assert button.text == "Light colours"
    assert first[0] == first[1] == "rgb(255, 255, 255)"
    assert second[0] == second[1] == "rgb(20, 23, 27)"


def fits_a_phone(browser: Chrome) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    fits = "return document.documentElement.scrollWidth === 390"
    WebDriverWait(browser, 20, poll_frequency=0.05).until(lambda b: b.execute_script(fits))
    WebDriverWait(browser, 20, poll_frequency=0.05).until(lambda b: b.execute_script(CUT) == [])
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def nothing_was_said_or_fetched(browser: Chrome, page: Path) -> None:
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    fetched = {
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
        and not message["params"]["documentURL"].startswith("chrome")  # its own first tab
    }
    assert {url for url in fetched if not url.startswith("data:")} == {page.as_uri()}


def hostile_text_stays_text(browser: Chrome, path: Path, document: dict[str, Any]) -> None:
    """A trainer and a run of a hostile name, a bar of five digits, and a case that failed."""
    cell = {"batch_size": 8, "seq_len": 256}.items()
    rows, cases = ([r for r in document[part] if cell <= r.items()] for part in ("rows", "cases"))
    names, failed = {"dpsgd": HOSTILE}, {"dpsgd_ghost": {"error": "CaseOutOfMemory"}}
    rows = [
        {**row, "trainer": names.get(row["trainer"], row["trainer"])}
        | {"value": row["value"] * (30 if row["trainer"] == "dpsgd_fgc" else 1)}
        for row in rows
        if row["trainer"] not in failed
    ]
    cases = [
        {**case, "trainer": names.get(case["trainer"], case["trainer"])}
        | failed.get(case["trainer"], {})
        for case in cases
    ]
    show(browser, path, (HOSTILE, {**document, "rows": rows, "cases": cases}))
    # An alert would have raised.
    assert browser.execute_script("return document.scripts.length") == 3
    shown = [cells[0] for cells in table(browser, "table-trainers")["texts"]]
    assert HOSTILE in shown
    ticks = "return [...document.querySelectorAll('.ytick')].map((tick) => tick.textContent)"
    assert any(tick.startswith("</script>") for tick in browser.execute_script(ticks))
