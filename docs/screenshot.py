"""Takes docs/timeline.png: the timeline of a short run of apex_cartpole, in a real browser.

    python docs/screenshot.py [RUN]

It needs Chromium. Without a run folder, one is made first."""

import sys
import tempfile
from pathlib import Path

import tianji
from tianji import trace
from tianji.view import timeline

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS.parent / "tests"))
from browser import Browser  # noqa: E402

WIDTH, HEIGHT = 1100, 500


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) > 1:
            run = Path(sys.argv[1])
        else:
            overrides = ["stop.seconds=6", "stop.return=inf"]
            run = Path(tianji.train("apex_cartpole", overrides, runs=folder).run_dir)
        page = Path(folder) / "page.html"
        page.write_text(timeline.page(trace.read(run), "apex_cartpole"), encoding="utf-8")
        with Browser(WIDTH, HEIGHT) as browser:
            browser.open(page.as_uri())
            browser.until("document.documentElement.dataset.timelines == 1")
            box = browser.js(
                "(r => [r.x, r.y, r.width])(document.querySelector('canvas')"
                ".getBoundingClientRect())"
            )
            browser.mouse("mouseMoved", box[0] + 0.55 * box[2], box[1] + 22 + 12)
            height = browser.js("Math.ceil(document.body.getBoundingClientRect().bottom)")
            browser.size(WIDTH, height)
            browser.drawn()
            browser.picture(DOCS / "timeline.png")
    print(DOCS / "timeline.png", (DOCS / "timeline.png").stat().st_size)


if __name__ == "__main__":
    main()
