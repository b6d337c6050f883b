"""Takes the pictures of timelines in docs/, in a real browser: timeline.png, a short run of
apex_cartpole, and compare.png, one task under several presets.

    python docs/screenshot.py [timeline] [compare]

It needs Chromium. It makes the runs first."""

import sys
import tempfile
from pathlib import Path

import tianji
from tianji import trace
from tianji.compare import compare
from tianji.view import timeline

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS.parent / "tests"))
from browser import Browser  # noqa: E402

WIDTH, HEIGHT = 1100, 500
PRESETS = ["sync", "periodic", "one_step", "tianji"]


def take_timeline(browser: Browser, folder: str) -> None:
    """One run, the pointer on an event."""
    overrides = ["stop.seconds=6", "stop.return=inf"]
    run = Path(tianji.train("apex_cartpole", overrides, runs=folder).run_dir)
    page = Path(folder) / "page.html"
    page.write_text(timeline.page(trace.read(run), "apex_cartpole"), encoding="utf-8")
    show(browser, page)
    box = browser.js(
        "(r => [r.x, r.y, r.width])(document.querySelector('canvas').getBoundingClientRect())"
    )
    browser.mouse("mouseMoved", box[0] + 0.55 * box[2], box[1] + 22 + 12)
    taken(browser, "timeline.png")


def take_compare(browser: Browser, folder: str) -> None:
    """Nothing of the page but the rows of all presets."""
    overrides = ["algorithm.epochs=1", "network.hidden=[256,256]", "scale.actors=2",
                 "scale.envs_per_actor=16", "scale.rollout_length=64", "stop.seconds=6",
                 "stop.return=inf"]  # fmt: skip
    show(browser, compare("ppo_lunarlander", overrides, presets=PRESETS, runs=folder).html)
    browser.js(
        "(s => { document.body.replaceChildren(s); s.style.margin = '12px';"
        " s.querySelector('.tj-scroll').remove(); })(document.querySelector('.tj-timeline'))"
    )
    taken(browser, "compare.png")


def show(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    browser.until("document.documentElement.dataset.timelines > 0")


def taken(browser: Browser, name: str) -> None:
    browser.size(WIDTH, browser.js("Math.ceil(document.body.getBoundingClientRect().bottom)"))
    browser.drawn()
    browser.picture(DOCS / name)
    print(DOCS / name, (DOCS / name).stat().st_size)


def main() -> None:
    known = {"timeline": take_timeline, "compare": take_compare}
    for name in sys.argv[1:] or known:
        with tempfile.TemporaryDirectory() as folder, Browser(WIDTH, HEIGHT) as browser:
            known[name](browser, folder)


if __name__ == "__main__":
    main()
