"""One page about a run, as HTML; it holds all that it shows."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from tianji.explain import Explained
from tianji.view import charts, timeline, words
from tianji.view.parts import Part, facts
from tianji.view.sections import sections

STYLE = (
    charts.STYLE
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:1rem clamp(.75rem,3vw,2rem) 3rem}
h1{font-size:1.5rem;margin:.5rem 0 0;overflow-wrap:anywhere}
main>section>h2{font-size:1.15rem;margin:2rem 0 .6rem;padding-top:.8rem;
border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.1rem 0 .35rem}
p{margin:.4rem 0;max-width:75ch}
.soft{color:var(--soft)}
.pill{display:inline-block;padding:.05rem .6rem;border-radius:1rem;border:1px solid currentColor;
font-size:.85rem;font-weight:600}
.good{color:var(--good)}.bad{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:.6rem;
margin:1rem 0;padding:0}
.tiles div{background:var(--card);border-radius:8px;padding:.55rem .8rem}
.tiles dt{font-size:.8rem;color:var(--soft)}
.tiles dd{margin:0;font-size:1.2rem;font-weight:600;font-variant-numeric:tabular-nums}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:1rem 2rem}
figure{margin:0;min-width:0}
figcaption{font-size:.9rem;font-weight:600;margin-bottom:.2rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--line);
vertical-align:top}
th{font-weight:600;color:var(--soft)}
td.n,th.n{text-align:right}
dl.facts{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.15rem 1rem;margin:0;
font-size:.92rem}
dl.facts dt{color:var(--soft)}
dl.facts dd{margin:0;overflow-wrap:anywhere}
ol.advice{max-width:75ch;padding-left:1.3rem}
ol.advice li{margin:.4rem 0}
code{font:.9em ui-monospace,monospace;overflow-wrap:anywhere}
"""
)


def html(run: Explained) -> str:
    """The page, self-contained."""
    name = run.run.resolve().name
    style, script = (timeline.STYLE, timeline.SCRIPT) if run.tracks else ("", "")
    return page(f"{name}: how the run went", _head(run, name), sections(run), style, script)


def page(
    title: str,
    head: str,
    sections: Iterable[tuple[str, Iterable[Part]]],
    style: str = "",
    script: str = "",
) -> str:
    """A whole HTML page with those sections that have something."""
    shown = [(name, "".join(part.html for part in parts)) for name, parts in sections]
    inside = "".join(
        f"<section><h2>{escape(name)}</h2>{html}</section>" for name, html in shown if html
    )
    main = f"<main><header>{head}</header>{inside}</main>"
    return timeline.document(title, main, STYLE + style, script)


def _head(run: Explained, name: str) -> str:
    mood = "good" if run.status == "done" else "bad" if run.status in BAD else "soft"
    verdict = f"<p><strong>{escape(run.verdict)}</strong></p>" if run.verdict else ""
    title = " · ".join(run.about[k] for k in ("algorithm", "environment", "preset", "engine")
                       if k in run.about)  # fmt: skip
    return (
        f'<h1>{escape(name)}</h1><p class="soft">{escape(title)}</p>'
        f'<p><span class="pill {mood}">{escape(run.status)}</span> {escape(run.ending)}</p>'
        f"{verdict}{facts(words.facts(run), 'tiles').html}"
    )


BAD = ("failed", "killed")
