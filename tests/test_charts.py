"""Charts: what is drawn is where the numbers say, whole, and readable by a parser."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tianji.view import charts
from tianji.view.charts import Axis, Series

number = st.floats(-1e9, 1e9, allow_nan=False)


def parsed(svg):
    return ET.fromstring(svg)


@given(st.lists(st.tuples(number, number), min_size=1, max_size=30))
def test_every_point_lies_within_the_axes(points):
    svg = parsed(charts.lines([Series("a", points)], Axis("x"), Axis("y"), "alt"))
    found = [c.attrib["points"] for c in svg.iter("polyline")] or [
        f"{c.attrib['cx']},{c.attrib['cy']}" for c in svg.iter("circle")
    ]
    for pair in " ".join(found).split():
        x, y = map(float, pair.split(","))
        assert charts.LEFT - 1 <= x <= charts.WIDE - charts.RIGHT + 1
        assert charts.TOP - 1 <= y <= charts.HIGH - charts.BOTTOM + 1


def test_a_line_goes_up_where_its_values_do():
    svg = parsed(
        charts.lines([Series("a", [(0, 0), (1, 5), (2, 10)])], Axis("s"), Axis("r"), "alt")
    )
    points = [tuple(map(float, p.split(","))) for p in svg.find("polyline").get("points").split()]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)


def test_a_chart_has_its_units_its_alternative_text_and_ticks():
    svg = parsed(
        charts.lines(
            [Series("a", [(0, 0), (40, 2000)])], Axis("seconds"), Axis("steps/s"), "how fast"
        )
    )
    texts = [t.text for t in svg.iter("text")]
    assert {"seconds", "steps/s", "0", "1000", "2000", "40"} <= set(texts)
    assert svg.get("aria-label") == "how fast"
    assert svg.find("title").text == "how fast"


def test_names_are_escaped():
    svg = charts.lines([Series("<b>&", [(0, 1), (1, 2)])], Axis("<x>"), Axis("&"), '"<alt>"')
    assert "<b>" not in svg
    assert parsed(svg).get("aria-label") == '"<alt>"'
    assert "<u>" not in charts.key([("c1", "<u>", "<u>")])


@given(st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=30))
def test_rounded_shares_add_up_to_a_hundred(shares):
    total = sum(shares)
    if total == 0:
        return
    rounded = charts.rounded([part / total for part in shares])
    assert sum(rounded) == pytest.approx(100.0, abs=1e-9)
    for part, figure in zip(shares, rounded, strict=True):
        assert abs(figure - 100 * part / total) <= 0.1 + 1e-9


def test_a_bar_of_shares_is_whole():
    svg = parsed(charts.share([("c1", 0.25, "a"), ("w1", 0.75, "b")], "alt"))
    rects = [(float(r.get("x")), float(r.get("width"))) for r in svg.iter("rect")]
    assert rects == [(0.0, 250.0), (250.0, 750.0)]


@given(number, number, st.integers(2, 10))
def test_ticks_are_round_within_the_range_and_not_too_many(low, high, about):
    low, high = min(low, high), max(low, high)
    found = charts.ticks(low, high, about)
    assert 1 <= len(found) <= about + 2 or not high > low
    assert all(low - 1e-6 * abs(high - low) <= t <= high + 1e-6 * abs(high - low) for t in found)


def test_a_long_line_keeps_its_extremes():
    points = [(float(i), 0.0) for i in range(10_000)]
    points[5_000] = (5_000.0, 99.0)
    points[7_001] = (7_001.0, -99.0)
    thin = charts.thin(points)
    assert len(thin) <= charts.MOST_POINTS + 2
    assert points[5_000] in thin
    assert points[7_001] in thin
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)


def test_one_point_is_a_dot_and_none_is_nothing():
    assert (
        len(
            list(
                parsed(charts.lines([Series("a", [(3, 3)])], Axis("x"), Axis("y"), "one")).iter(
                    "circle"
                )
            )
        )
        == 1
    )
    assert charts.lines([], Axis("x"), Axis("y"), "none") == ""
    assert charts.dots([], Axis("x"), Axis("y"), "none") == ""
    assert charts.bars([], Axis("x"), Axis("y"), "none") == ""
