"""The page of a trace: what is in it, and in a real browser what it shows and how it is used."""

import base64
import json
import re
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
from browser import ABSENT, CHROMIUM, Browser

from tianji.trace import NUMBERS, Track, kind_of
from tianji.view import timeline

ACTOR = ("actor/infer", "actor/simulate", "actor/push", "actor/load", "actor/wait_learner")
LEARNER = ("learner/take", "learner/update", "learner/push", "learner/wait_buffer")


def track(host, keys, events, begin=0.0):
    """A track of (key's kind, seconds), one after the other; None: nothing is known."""
    at, rows = begin, []
    for kind, length in events:
        if kind is not None:
            index = next(i for i, key in enumerate(keys) if key.partition("/")[2] == kind)
            rows.append((index, at, at + length))
        at += length
    key, begins, ends = (np.array(column) for column in zip(*rows, strict=True))
    return Track(host, keys, key.astype(np.int16), begins, ends)


def figure(updates=20):
    """Two actors and a learner in lock-step: 1 s of acting, 0.5 s of learning."""
    acting = [("load", 0.02), *[("infer", 0.03), ("simulate", 0.065)] * 10, ("push", 0.03)]
    actor = [*acting, ("wait_learner", 0.5)] * updates
    learner = [("wait_buffer", 1.0), ("take", 0.1), ("update", 0.38), ("push", 0.02)] * updates
    return [track("actor-0", ACTOR, actor), track("actor-1", ACTOR, actor),
            track("learner", LEARNER, learner)]  # fmt: skip


def unpacked(packed):
    raw = zlib.decompress(base64.b64decode(packed["data"]))
    n = packed["n"]
    planes = np.frombuffer(raw[n:], np.uint8).reshape(4, n)
    return np.frombuffer(raw[:n], np.uint8), np.ascontiguousarray(planes.T).view("<u4").ravel()


def content(text):
    found = re.search(r'<script type="application/json" class="tj-data">(.*?)</script>', text, re.S)
    return json.loads(found[1])


def test_every_kind_of_work_has_a_name_in_the_legend_and_the_paper_s_four_their_numbers():
    assert [timeline.LEGEND[kind] for kind in NUMBERS] == [
        "1 inference", "2 simulation", "3 update", "4 priorities",
    ]  # fmt: skip
    named = {
        "actor/infer": "inference", "actor/simulate": "simulation", "learner/take": "update",
        "learner/update": "update", "buffer/prioritize": "priorities", "actor/push": "push",
        "buffer/serve": "push", "buffer/grant": "push", "actor/load": "probe", "actor/ask": "push",
        "buffer/receive": "probe", "actor/wait_server": "wait", "evaluator/evaluate": "evaluation",
        "run/other": "other", "driver/turn": "other", "learner/tell": "other",
        "actor/rebuild": "other", "learner/mix": "update",
    }  # fmt: skip
    assert {key: kind_of(key) for key in named} == named
    assert set(named.values()) == set(timeline.LEGEND)


def test_what_is_packed_is_what_was_traced_gaps_and_long_waits_included():
    events = [("infer", 1.25e-5), (None, 3.0), ("wait_learner", 1000.0), ("push", 2e-7)]
    made = track("actor-0", ACTOR, events, begin=17.0)
    packed = timeline._packed(made)
    key, units = unpacked(packed)
    most = 2**32 - 1
    wait = 10_000_000_000
    assert key.tolist() == [0, 255, 4, 4, 4, 2]
    assert units.tolist() == [125, 30_000_000, most, most, wait - 2 * most, 2]
    assert packed["begin"] == 17.0
    assert packed["kind"] == [list(timeline.LEGEND).index(kind_of(key)) for key in ACTOR]


def test_a_page_of_sixteen_full_rings_is_a_few_megabytes():
    rng = np.random.default_rng(0)
    n = 2**16
    key = (np.arange(n) % 2).astype(np.int16)
    tracks = []
    for i in range(16):
        ends = np.cumsum(rng.lognormal(np.log(3e-5), 0.5, n))
        tracks.append(Track(f"actor-{i}", ACTOR, key, np.append(0, ends[:-1]), ends))
    size = len(timeline.page(tracks, "large"))
    assert 1e6 < size < 4.5e6


def test_a_few_updates_from_the_middle_are_shown_first():
    begin, end = timeline.home(figure())
    assert 3 * 1.5 < end - begin < 5 * 1.5
    assert begin < 15 < end, "the middle of 30 s"
    without = [one for one in figure() if one.host != "learner"]
    assert timeline.home(without) == pytest.approx((13.5, 16.5), rel=0.01)
    late = track("actor-0", ACTOR, [("infer", 0.5)], begin=0.0)
    apart = track("actor-1", ACTOR, [("infer", 0.5)], begin=2.0)
    assert timeline.home([late, apart]) == pytest.approx((1.125, 1.375))
    assert timeline.home([]) == (0.0, 1.0)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.addresses = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]


def test_names_are_escaped_and_nothing_is_fetched():
    name = "</script><script>alert(1)</script>&\"'<b>"
    keys = (f"actor/{name}", "actor/infer")
    made = track(name, keys, [("infer", 1.0)])
    text = timeline.page([made], name)
    parser = Tags()
    parser.feed(text)
    assert parser.tags.count("script") == 2
    assert "b" not in parser.tags
    assert parser.addresses == []
    assert "http" not in timeline.SCRIPT + timeline.STYLE
    assert content(text)["tracks"][0]["host"] == name
    assert 'id="&lt;x&quot;&gt;"' in timeline.fragment([made], "t", '<x">')


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip(ABSENT)
    with Browser(1200, 700) as browser:
        yield browser


@pytest.fixture
def shown(browser, tmp_path):
    """The figure in the browser, as it is first shown."""
    return show(browser, tmp_path, timeline.page(figure(), "run <b>1</b>"))


def show(browser, tmp_path, text):
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    browser.size(1200, 700)
    browser.dark(False)
    browser.open(path.as_uri())
    browser.until("document.documentElement.dataset.timelines > 0")
    browser.until("document.querySelector('.tj-part').dataset.from")
    assert browser.errors == []
    return browser


def box(browser, index=0):
    names = "['x', 'y', 'width', 'height']"
    rect = f"document.querySelectorAll('canvas')[{index}].getBoundingClientRect()"
    return browser.js(f"(r => {names}.map(n => r[n]))({rect})")


def extent(browser, index=0):
    part = f"document.querySelectorAll('.tj-part')[{index}].dataset"
    return tuple(float(browser.js(f"{part}.{name}")) for name in ("from", "to"))


def pixel(browser, x, y, index=0):
    """The colour of a point of the canvas."""
    return tuple(browser.js(
        f"(c => Array.from(c.getContext('2d').getImageData({x} * devicePixelRatio, "
        f"{y} * devicePixelRatio, 1, 1).data))(document.querySelectorAll('canvas')[{index}])"
    ))  # fmt: skip


def colour(browser, kind):
    """Of a kind of work, as a canvas has it."""
    text = browser.js(
        "getComputedStyle(document.querySelector('.tj-timeline'))"
        f".getPropertyValue('--tj-{kind}').trim()"
    )
    return (*(int(text[i : i + 2], 16) for i in (1, 3, 5)), 255)


def point(browser, time, row):
    """Where a time is shown on a row, from the window's corner."""
    x, y, width, _ = box(browser)
    begin, end = extent(browser)
    gutter = float(browser.js(GUTTER))
    return x + gutter + (time - begin) / (end - begin) * (width - gutter), y + 22 + 30 * row + 12


GUTTER = """(() => {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = "12px system-ui, sans-serif";
  const names = [...document.querySelectorAll(".tj-shares tbody th")].map(c => c.textContent);
  return 10 + Math.max(...names.map(n => pen.measureText(n).width));
})()"""


def tip(browser):
    return browser.js("(t => t.hidden ? null : t.textContent)(document.querySelector('.tj-tip'))")


def shares(browser):
    """The table as {row: {column: percent}}."""
    rows = browser.js(
        "[...document.querySelectorAll('.tj-shares tr')].map(r => [...r.cells].map("
        "c => c.textContent))"
    )
    head, *body = rows
    return {
        row[0]: {name: float(cell) for name, cell in zip(head[2:], row[2:], strict=True) if cell}
        for row in body
    }


def test_rows_legend_and_shares_are_there(shown):
    assert shown.js("document.querySelector('h2').textContent") == "run <b>1</b>"
    legend = shown.js("[...document.querySelectorAll('.tj-legend li')].map(e => e.textContent)")
    assert legend == list(timeline.LEGEND.values())
    found = shares(shown)
    assert list(found) == ["actor-0", "actor-1", "learner"]
    for row in found.values():
        assert sum(row.values()) == pytest.approx(100, abs=0.5)
    assert found["learner"] == pytest.approx({"3 update": 32, "push": 1.3, "wait": 66.7}, abs=2)
    begin, end = extent(shown)
    assert (begin, end) == pytest.approx(timeline.home(figure()))


def test_an_event_is_drawn_in_its_colour_at_its_place(shown):
    """The learner updates for 0.38 s from 1.1 s of each 1.5 s on; the actors wait meanwhile."""
    x0, y0, *_ = box(shown)
    for time, row, kind in [(16.3, 2, "update"), (16.3, 0, "wait"), (15.5, 2, "wait"),
                            (16.49, 2, "push")]:  # fmt: skip
        x, y = point(shown, time, row)
        assert pixel(shown, x - x0, y - y0 + 10) == colour(shown, kind), (time, kind)
    # 0.03 s of inference and 0.065 s of simulation, over and over: a part of each column
    x, y = point(shown, 15.5, 0)
    seen = {pixel(shown, x - x0 + dx, y - y0 + 8) for dx in range(-6, 7)}
    assert {colour(shown, "inference"), colour(shown, "simulation")} <= seen


def test_hovering_says_what_when_how_long_and_for_whom(shown):
    assert tip(shown) is None
    shown.mouse("mouseMoved", *point(shown, 16.3, 2))
    assert tip(shown) == "learner\n3 update\nfrom 16.100000 s\nfor 380.0 ms"
    shown.mouse("mouseMoved", *point(shown, 16.05, 2))
    assert tip(shown) == "learner\n3 update: take\nfrom 16.000000 s\nfor 100.0 ms"
    shown.mouse("mouseMoved", *point(shown, 16.3, 1))
    assert tip(shown) == "actor-1\nwaits for learner\nfrom 16.000000 s\nfor 500.0 ms"
    shown.mouse("mouseMoved", 600, 2)
    assert tip(shown) is None


def test_the_wheel_zooms_where_the_pointer_is(shown):
    begin, end = extent(shown)
    x, y = point(shown, 16.3, 2)
    shown.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400)
    a, b = extent(shown)
    assert b - a == pytest.approx((end - begin) / np.e, rel=1e-3)
    assert point(shown, 16.3, 2)[0] == pytest.approx(x, abs=1)
    shown.mouse("mouseWheel", x, y, deltaX=150, deltaY=0)
    moved, _ = extent(shown)
    assert moved == pytest.approx(a + 0.25 * (b - a), rel=1e-3)


def test_dragging_selects_a_range_and_a_double_click_goes_back(shown):
    home, before = extent(shown), shares(shown)
    x0, y = point(shown, 16.1, 1)
    x1, _ = point(shown, 16.4, 1)
    button = {"button": "left", "buttons": 1, "clickCount": 1}
    shown.mouse("mousePressed", x0, y, **button)
    shown.mouse("mouseMoved", (x0 + x1) / 2, y, **button)
    shown.mouse("mouseMoved", x1, y, **button)
    shown.mouse("mouseReleased", x1, y, **button)
    a, b = extent(shown)
    assert (a, b) == pytest.approx((16.1, 16.4), abs=0.02)
    assert shares(shown)["learner"] == {"3 update": 100.0}
    assert shares(shown)["actor-0"] == {"wait": 100.0}
    for count in (1, 2):
        more = {"button": "left", "clickCount": count}
        shown.mouse("mousePressed", x0, y, **more)
        shown.mouse("mouseReleased", x0, y, **more)
    assert extent(shown) == pytest.approx(home)
    assert shares(shown) == before


def test_shift_and_drag_moves(shown):
    begin, end = extent(shown)
    x, y = point(shown, 16.0, 1)
    button = {"button": "left", "buttons": 1, "clickCount": 1, "modifiers": 8}
    shown.mouse("mousePressed", x, y, **button)
    shown.mouse("mouseMoved", x - 200, y, **button)
    shown.mouse("mouseReleased", x - 200, y, **button)
    a, b = extent(shown)
    assert b - a == pytest.approx(end - begin)
    assert a > begin
    assert point(shown, 16.0, 1)[0] == pytest.approx(x - 200, abs=1)


def test_two_fingers_zoom_and_one_moves(shown):
    begin, end = extent(shown)
    _, y = point(shown, 16.0, 1)
    shown.ask("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
    try:
        shown.touch("touchStart", (500, y), (600, y))
        for wide in (20, 40, 60, 80, 100):
            shown.touch("touchMove", (500 - wide, y), (600 + wide, y))
        shown.touch("touchEnd")
        a, b = extent(shown)
        assert b - a == pytest.approx((end - begin) / 3, rel=0.05)
        shown.touch("touchStart", (600, y))
        for x in (590, 570, 540, 500):
            shown.touch("touchMove", (x, y))
        shown.touch("touchEnd")
        assert extent(shown)[0] > a
        assert np.subtract(*extent(shown)) == pytest.approx(a - b)
    finally:
        shown.ask("Emulation.setTouchEmulationEnabled", enabled=False)


def test_buttons_and_keys_do_the_same(shown):
    begin, end = extent(shown)
    span = end - begin

    def press(name):
        shown.js(f"document.querySelector('[data-do={name}]').click()")
        shown.drawn()
        return extent(shown)

    a, b = press("in")
    assert b - a == pytest.approx(span / 2)
    a, b = press("right")
    assert a > begin
    assert press("home") == pytest.approx((begin, end))
    a, b = press("all")
    assert a <= 0
    assert b >= 30
    press("home")
    shown.js("document.querySelector('canvas').focus()")
    shown.press_key("+")
    assert np.subtract(*extent(shown)) == pytest.approx(-span / 2)
    shown.press_key("-")
    shown.press_key("ArrowRight")
    assert extent(shown)[0] == pytest.approx(begin + 0.2 * span)
    shown.press_key("0")
    assert extent(shown) == pytest.approx((begin, end))
    for _ in range(2):
        shown.press_key("ArrowDown")
    said = "document.querySelector('.tj-said').textContent"
    assert shown.js(said) == "learner"
    shown.press_key("ArrowRight", shift=True)
    first = shown.js(said)
    shown.press_key("ArrowRight", shift=True)
    assert shown.js(said) != first
    assert tip(shown) == shown.js(said)
    shown.press_key("Escape")
    assert tip(shown) is None


def test_it_is_drawn_anew_in_the_dark_and_fits_a_phone(shown):
    paper = pixel(shown, 2, 2)
    shown.dark()
    shown.drawn()
    assert pixel(shown, 2, 2) != paper
    assert pixel(shown, 2, 2) == colour(shown, "paper")
    for width in (360, 1600):
        shown.size(width, 700, scale=2 if width == 360 else 1)
        shown.drawn()
        wide = "document.documentElement.scrollWidth"
        assert shown.js(wide) <= width
        assert box(shown)[2] == pytest.approx(width - 32, abs=1)
    assert shown.errors == []


def test_a_host_with_several_roles_has_a_row_for_each(browser, tmp_path):
    keys = ("actor/infer", "buffer/serve", "learner/update", "driver/turn", "run/other")
    events = [("infer", 0.2), ("turn", 0.1), ("serve", 0.1), ("update", 0.5), ("other", 0.1)] * 9
    show(browser, tmp_path, timeline.page([track("serial", keys, events)], "serial"))
    rows = shares(browser)
    assert list(rows) == [f"serial · {role}" for role in ("actor", "buffer", "learner", "run")]
    assert sum(sum(row.values()) for row in rows.values()) == pytest.approx(100, abs=0.5)
    assert rows["serial · learner"].keys() == {"3 update"}
    assert rows["serial · run"].keys() == {"other"}
    browser.mouse("mouseMoved", *point(browser, 4.1, 2))
    assert tip(browser) is None, "the actor is at work, not the learner"
    browser.mouse("mouseMoved", *point(browser, 4.1, 0))
    assert tip(browser).startswith("serial · actor\n1 inference: infer")


def test_timelines_of_one_page_show_the_same_stretch_of_time(browser, tmp_path):
    other = [track("serial", ("actor/infer", "learner/update"),
                   [("infer", 0.02), ("update", 0.02)] * 200)]  # fmt: skip
    text = (
        f"<!doctype html><meta charset=utf-8><style>{timeline.STYLE}</style>"
        f"{timeline.fragment(figure(), 'first', 'a')}{timeline.fragment(other, 'second', 'b')}"
        f"<script>{timeline.SCRIPT}</script>"
    )
    show(browser, tmp_path, text)
    assert browser.js("document.documentElement.dataset.timelines") == "2"
    homes = [timeline.home(figure())[0], timeline.home(other)[0]]

    def spans():
        return [extent(browser, i)[1] - extent(browser, i)[0] for i in range(2)]

    assert spans()[0] == pytest.approx(spans()[1])
    browser.mouse("mouseWheel", 600, box(browser)[1] + 40, deltaX=0, deltaY=-300)
    assert spans()[0] == pytest.approx(spans()[1])
    starts = [extent(browser, i)[0] - homes[i] for i in range(2)]
    assert starts[0] == pytest.approx(starts[1])
    assert starts[0] > 0


OTHER = ("learner/update", "learner/wait_buffer")


def test_runs_of_a_stack_have_one_axis_one_legend_and_one_table(browser, tmp_path):
    """Rows of all begin at the same place, however long their names are, and times count from
    where what is shown of each run begins."""
    later = [track("a-learner-with-a-long-name", OTHER,
                   [("update", 0.4), ("wait_buffer", 0.1)] * 20, begin=100.0)]  # fmt: skip
    runs = {"sync": figure(), "<i>free</i>": later, "none": []}
    text = (
        f"<!doctype html><meta charset=utf-8><style>{timeline.STYLE}</style>"
        f"{timeline.stack(runs, 'side by side', 'runs')}<script>{timeline.SCRIPT}</script>"
    )
    show(browser, tmp_path, text)
    count = "document.querySelectorAll('{}').length"
    assert browser.js(count.format(".tj-legend")) == 1
    assert browser.js(count.format(".tj-tools")) == 1
    assert browser.js(count.format("canvas")) == 2
    names = "[...document.querySelectorAll('.tj-part h3')].map(e => e.textContent)"
    assert browser.js(names) == list(runs)
    rows = browser.js(
        "[...document.querySelectorAll('.tj-shares tr')].map(r => r.cells[0].textContent)"
    )
    assert rows == ["", "sync", "actor-0", "actor-1", "learner", "<i>free</i>", later[0].host]
    last = "document.querySelectorAll('.tj-part')[2].textContent"
    assert "The trace is empty." in browser.js(last)

    homes = [timeline.home(one)[0] for one in (figure(), later)]
    span = extent(browser)[1] - extent(browser)[0]
    gutter = float(browser.js(GUTTER))
    for i, (time, row, kind, top) in enumerate([(16.3, 2, "update", 22), (105.3, 0, "update", 4)]):
        x0, y0, width, height = box(browser, i)
        assert height == top + 30 * (3 if i == 0 else 1)
        begin, end = extent(browser, i)
        assert (begin, end - begin) == pytest.approx((homes[i], span))
        x = gutter + (time - begin) / span * (width - gutter)
        y = top + 30 * row + 12
        assert pixel(browser, x, y + 10, i) == colour(browser, kind)
        browser.mouse("mouseMoved", x0 + x, y0 + y)
        shown = browser.js(f"document.querySelectorAll('.tj-tip')[{i}].textContent")
        since = (16.1 if i == 0 else 105.0) - homes[i]
        assert f"3 update\nfrom {since:.6f} s" in shown

    browser.js("document.querySelector('[data-do=in]').click()")
    browser.drawn()
    assert [extent(browser, i)[1] - extent(browser, i)[0] for i in (0, 1)] == pytest.approx(
        [span / 2, span / 2]
    )
    x, y, *_ = box(browser, 1)
    browser.mouse("mouseWheel", x + 600, y + 10, deltaX=0, deltaY=-400)
    assert extent(browser)[1] - extent(browser)[0] == pytest.approx(span / 2 / np.e, rel=1e-3)
    for width in (360, 1600):
        browser.size(width, 700)
        browser.drawn()
        assert browser.js("document.documentElement.scrollWidth") <= width
    assert browser.errors == []
