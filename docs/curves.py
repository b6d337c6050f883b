"""Draws results.svg from benchmarks/results/learning: `python docs/curves.py`."""

import io
import json
from pathlib import Path

import matplotlib

DOCS = Path(__file__).resolve().parent
LEARNING = DOCS.parent / "benchmarks" / "results" / "learning"
COLUMNS = 4


def main() -> None:
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tianji"
    from matplotlib import pyplot

    results = [json.loads(path.read_text()) for path in sorted(LEARNING.glob("*.json"))]
    height = -(-len(results) // COLUMNS)
    figure, axes = pyplot.subplots(
        height, COLUMNS, figsize=(11, 2.1 * height), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(results) :]:
        axis.set_axis_off()
    for axis, result in zip(axes.flat, results, strict=False):
        for run in result["runs"]:
            steps = [step / 1e6 for step, _, _ in run["curve"]]
            axis.plot(steps, [value for *_, value in run["curve"]], linewidth=1.0)
        axis.axhline(result["chance"], color="grey", linewidth=0.8, linestyle=":")
        if result["target"] is not None:
            axis.axhline(result["target"], color="grey", linewidth=0.8, linestyle="--")
        axis.set_title(result["config"], fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("env steps, millions", fontsize=8)
    figure.supylabel("return or share won, last 100 episodes", fontsize=8)
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    text = "\n".join(line.rstrip() for line in picture.getvalue().splitlines()) + "\n"
    (DOCS / "results.svg").write_text(text)


if __name__ == "__main__":
    main()
