"""What a page is made of, each as HTML and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from tianji.view import charts

Entries = Sequence[tuple[str, float, str, str]]
"""(colour, share, name, percent) of what a host's time went into"""

BAR = 50
"""characters of a bar"""


class Part(NamedTuple):
    """One of them; empty where the page, or the text, does not have it."""

    html: str = ""
    markdown: Sequence[str] = ()


def text(*lines: str, soft: bool = False) -> Part:
    tag = '<p class="soft">' if soft else "<p>"
    html = "".join(f"{tag}{escape(line)}</p>" for line in lines)
    return Part(html, [plain(line) for line in lines])


def numbered(lines: Sequence[str]) -> Part:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    told = [f"{i}. {plain(line)}" for i, line in enumerate(lines, 1)]
    return Part(f'<ol class="advice">{items}</ol>', told)


def facts(rows: Sequence[tuple[str, str]], kind: str = "facts") -> Part:
    """Names and what is known of each."""
    row = "<div><dt>{}</dt><dd>{}</dd></div>" if kind == "tiles" else "<dt>{}</dt><dd>{}</dd>"
    html = "".join(row.format(escape(name), escape(value)) for name, value in rows)
    return Part(f'<dl class="{kind}">{html}</dl>', _rows(("", ""), rows))


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: bool = True,
    columns: Sequence[int] | None = None,
) -> Part:
    """The first column is a name, the others are figures; Markdown has these `columns` of it."""

    def cells(tag: str, row: Sequence[str]) -> str:
        figure = ' class="n"' if figures else ""
        return "".join(
            f"<{tag}{figure if i else ''}>{escape(text)}</{tag}>" for i, text in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    html = (
        f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
    shown = range(len(head)) if columns is None else columns
    return Part(html, _rows([head[i] for i in shown], [[row[i] for i in shown] for row in rows]))


def shares(who: str, entries: Entries, least: float = 0.0) -> Part:
    """What a host's time went into: a bar, and what of it is at least so much by its name."""
    told = ", ".join(f"{name} {figure}" for _, _, name, figure in entries)
    bar = charts.share([(color, part, f"{name} {figure}") for color, part, name, figure in entries],
                       f"{who}: {told}")  # fmt: skip
    named = [(color, name, figure) for color, part, name, figure in entries if part >= least]
    drawn, end = "", 0.0
    for i, (color, part, _, _) in enumerate(entries):
        end += part
        glyph = "·" if color.startswith("w") else "█▓▒"[i % 3]
        drawn += glyph * (round(BAR * end) - len(drawn))
    rows = [(name, figure) for _, name, figure in named]
    return Part(bar + charts.key(named), [f"    {drawn}", "", *_rows(("", "share"), rows)])


def figures(drawn: Sequence[tuple[str, str]]) -> Part:
    """Charts side by side, each by what it is of; a text has none."""
    inside = "".join(
        f"<figure><figcaption>{caption}</figcaption>{chart}</figure>" for caption, chart in drawn
    )
    return Part(f'<div class="two">{inside}</div>')


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return lines + [f"| {' | '.join(plain(cell) for cell in row)} |" for row in rows]


def plain(text: str) -> str:
    """Text that Markdown takes as it is: in one line, with nothing that it would read as markup."""
    text = " ".join(str(text).split())
    for mark in ("\\", "|", "<", ">", "*", "_", "`", "[", "]"):
        text = text.replace(mark, f"\\{mark}")
    return text
