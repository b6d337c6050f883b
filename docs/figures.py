"""Draws the pictures of the docs from runs that it makes: `python docs/figures.py`.

live.svg: the live view as a terminal shows it, at the end of `tianji train ppo_cartpole seed=1`.
curve.svg: mean return of the last 100 episodes over env steps, of the shipped CartPole configs.
"""

import io
import re
import tempfile
from pathlib import Path

import matplotlib
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

import tianji
from tianji.view.status import SilentView
from tianji.view.terminal import LiveView, live_panel

DOCS = Path(__file__).resolve().parent
WIDTH = 100


class Kept(SilentView):
    """A view that keeps what the live view would have drawn."""

    every = LiveView.every

    def __init__(self):
        self.title, self.status, self.events = "", None, []

    def begin(self, title, facts):
        self.title = title

    def show(self, status):
        self.status = status

    def line(self, text):
        self.events.append(text)


def run(config, overrides=()):
    """A real run; what its view saw last, and how it ended."""
    view = Kept()
    with tempfile.TemporaryDirectory() as runs:
        result = tianji.train(config, overrides, runs=runs, view=view)
    print(f"{config}: {result.stop_reason}, {result.steps} steps, {result.wall_s:.1f} s")
    return view


def write(path, svg):
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def live(view):
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(live_panel(view.title, view.status, view.events[-2:], WIDTH, color=True))
    # no font from elsewhere: the picture is one file
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(
        title="tianji train ppo_cartpole seed=1", code_format=plain, unique_id="live"
    )
    write(DOCS / "live.svg", svg)


def curve(views):
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tianji"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    for name, view in views.items():
        steps, means = zip(*view.status.curve, strict=True)
        axes.plot([step / 1000 for step in steps], means, label=name)
    axes.axhline(475, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="env steps, thousands", ylabel="return, last 100 episodes")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    write(DOCS / "curve.svg", picture.getvalue())


if __name__ == "__main__":
    ppo, dqn = run("ppo_cartpole", ["seed=1"]), run("dqn_cartpole", ["seed=1"])
    live(ppo)
    curve({"PPO, configs/ppo_cartpole.toml": ppo, "DQN, configs/dqn_cartpole.toml": dqn})
