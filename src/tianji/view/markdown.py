"""One page about a run, as Markdown, and the few lines of it that a terminal shows."""

from __future__ import annotations

from tianji.explain import Explained
from tianji.view import words
from tianji.view.parts import facts, plain
from tianji.view.sections import sections


def markdown(run: Explained) -> str:
    """A run's page as text, with tables and bars of characters."""
    lines = [f"# {plain(run.run.resolve().name)}", "", f"**{run.status}**: {plain(run.ending)}", ""]
    if run.verdict:
        lines += [f"**{plain(run.verdict)}**", ""]
    lines += facts(words.facts(run)).markdown
    for title, parts in sections(run):
        inside = [line for part in parts if part.markdown for line in ("", *part.markdown)]
        if inside:
            lines += ["", f"## {title}", *inside]
    return "\n".join(lines) + "\n"


def summary(run: Explained) -> list[str]:
    """A few lines for a terminal."""
    lines = [f"{run.status}: {run.ending}"]
    lines += [f"  {name:<26} {text}" for name, text in words.facts(run)]
    if run.verdict:
        lines.append(f"  {'bottleneck':<26} {run.verdict}")
    if run.planned is not None and run.planned.deviation:
        lines.append(f"plan: {' '.join(run.planned.deviation)}")
    return lines + [f"next: {text}" for text in run.advice]
