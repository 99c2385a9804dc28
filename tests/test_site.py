"""The built site in Chromium: every page opens without an error, links lead somewhere, tables and plots work.

`make site-test` builds the site and runs these tests, which take some minutes and are not part of `make test`. They are
skipped where Chromium or the site is missing.
"""

import re
import shutil
from itertools import groupby
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from bnrnn.config import ROOT

SITE = ROOT / "site"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NARROW, WIDE = {"width": 400, "height": 800}, {"width": 1280, "height": 900}
CLAIMS, TABLE1 = "results/claims.html", "results/cooijmans2016/table1.html"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the site is not built: run `make site-test`"),
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser):
    """A page without a network: a request for anything but a file is aborted and counts as an error."""
    opened = browser.new_page(viewport=WIDE)
    opened.errors = []
    opened.route(re.compile(r"^https?:"), lambda route: (opened.errors.append(route.request.url), route.abort()))
    opened.on("console", lambda message: opened.errors.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: opened.errors.append(str(error)))
    opened.on("requestfailed", lambda request: opened.errors.append(request.url))
    yield opened
    opened.close()


def address(name: str) -> str:
    return (SITE / name).as_uri()


def pages() -> list[Path]:
    return sorted(SITE.rglob("*.html"))


def test_every_page_opens_without_an_error_and_fits_a_narrow_screen(page):
    wrong = {}
    page.set_viewport_size(NARROW)
    for path in pages():
        page.goto(path.as_uri())
        if page.locator("#curves, #statistics").count():
            page.locator(".js-plotly-plot").first.wait_for()
        width = page.evaluate("document.documentElement.scrollWidth")
        if page.errors or width > NARROW["width"]:
            wrong[str(path.relative_to(SITE))] = [*page.errors, f"width {width}"]
            page.errors.clear()
    assert len(pages()) > 100
    assert not wrong


@pytest.mark.parametrize("name", ["index.html", "gallery.html", "results/claims.html", "docs/layer.html"])
def test_pages_fit_windows_of_any_width(page, name):
    """The side bars and the text have fixed widths, which a window may not have room for."""
    page.goto(address(name))
    for width in range(500, 1700, 60):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_every_link_leads_to_a_page_and_to_a_place_in_it():
    texts = {path: path.read_text() for path in pages()}
    places = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()}
    wrong = []
    for path, text in texts.items():
        for link in set(re.findall(r'\b(?:href|src)="([^"]+)"', text)):
            parts = urlsplit(link.replace("&amp;", "&"))
            if parts.scheme or link == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            if not target.exists() or (place and target in places and place not in places[target]):
                wrong.append(f"{path.relative_to(SITE)}: {link}")
    assert len(texts) > 100
    assert not wrong


def shown(page) -> list[str]:
    return page.locator("#claims tbody tr:visible td:first-child").all_inner_texts()


def test_claims_are_filtered_by_paper_verdict_scope_and_words(page):
    page.goto(address(CLAIMS))
    total = len(shown(page))
    page.select_option("#claims-controls select[name=paper]", label="Laurent et al. 2015")
    assert [text[0] for text in shown(page)] == ["L"] * len(shown(page))
    assert 0 < len(shown(page)) < total
    page.click("#claims-controls button[type=reset]")
    page.wait_for_function(f"document.querySelectorAll('#claims tbody tr:not([hidden])').length === {total}")
    page.select_option("#claims-controls select[name=length]", "holds")
    verdicts = page.locator("#claims tbody tr:visible .verdict").all_inner_texts()[::2]
    assert verdicts == ["holds"] * len(verdicts)
    assert verdicts
    page.select_option("#claims-controls select[name=length]", "")
    page.select_option("#claims-controls select[name=early]", "disagrees")
    assert 0 < len(shown(page)) < total
    page.select_option("#claims-controls select[name=early]", "")
    page.fill("#claims-controls input[name=words]", "TEXT8 lstm")
    assert [text.split()[0] for text in shown(page)] == ["C13"]
    assert page.locator("#claims-controls output").inner_text() == f"1 of {total}"
    assert not page.errors


def test_claims_are_sorted_with_the_keyboard(page):
    page.goto(address(CLAIMS))
    first = shown(page)
    header = page.locator("#claims thead button", has_text="claim")
    header.focus()
    page.keyboard.press("Enter")
    assert shown(page) == first
    page.keyboard.press("Enter")
    assert shown(page) == first[::-1]
    assert header.locator("xpath=..").get_attribute("aria-sort") == "descending"
    page.locator("#claims thead button", has_text="at the paper's length").press("Enter")
    kinds = page.locator("#claims tbody td:nth-child(2) .verdict").evaluate_all("all => all.map((v) => v.className)")
    assert kinds[0] == "verdict holds" and kinds[-1] == "verdict not-run"
    assert len([kind for kind, _ in groupby(kinds)]) == len(set(kinds)) > 2


def test_a_claim_links_to_its_page_and_to_its_runs(page):
    page.goto(address(CLAIMS))
    page.locator("#claims tbody tr", has_text="C2").first.locator("a", has_text="Table 1").click()
    assert page.url == address(TABLE1)
    page.go_back()
    page.locator("#claims a", has_text="C2").first.click()
    assert page.url.endswith("results/claims/C2.html")
    assert page.locator("h1", has_text="C2").count() == 1


def in_plot(page, expression: str):
    """The value of an expression in JavaScript that begins with the first plot of Table 1's page."""
    if page.url != address(TABLE1):
        page.goto(address(TABLE1))
        page.locator(".js-plotly-plot").first.wait_for()
    return page.evaluate(f"document.querySelector('.js-plotly-plot').{expression}")


def traces(page) -> list[dict]:
    return in_plot(page, "data.map(({name, x, y}) => ({name, x, y}))")


def test_a_seed_a_metric_and_an_axis_are_chosen_in_a_plot(page):
    before = traces(page)
    mean = next(trace for trace in before if trace["name"] == "BN-LSTM (n=3)" and trace is not None)
    page.uncheck("#curves input[name=member-0]")
    after = traces(page)
    assert len(after) == len(before) - 2  # one run of each model
    assert any(trace["name"] == "BN-LSTM (n=2)" for trace in after)
    assert not any(trace["name"] == mean["name"] for trace in after)
    page.check("#curves input[name=member-0]")
    assert traces(page) == before
    page.select_option("#curves select[name=axis]", "seconds of training updates")
    assert traces(page)[0]["x"] != before[0]["x"]
    assert not any("paper" in trace["name"] for trace in traces(page))  # the paper has no seconds
    page.select_option("#curves select[name=metric]", "train/loss")
    assert traces(page)[0]["y"] != before[0]["y"]
    page.check("#curves input[name=logY]")
    assert in_plot(page, "layout.yaxis.type") == "log"
    assert not page.errors


def test_the_papers_curve_is_cut_at_the_length_of_our_runs_until_it_is_asked_for(page):
    last = "layout.xaxis.range?.[1] ?? 1e9"
    short = in_plot(page, last)
    page.check("#curves input[name=whole]")
    assert in_plot(page, last) > short


def test_a_line_of_a_plot_opens_the_page_of_its_run(page):
    found = in_plot(page, "data.map((trace) => trace.customdata?.[0]).find(Boolean)")
    assert (SITE / found).exists()
    in_plot(page, f"emit('plotly_click', {{points: [{{customdata: '{found}'}}]}})")
    page.wait_for_url("**/runs/**")
    assert page.locator("h2", has_text="Configuration").count() == 1
