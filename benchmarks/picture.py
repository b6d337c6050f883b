"""Pictures of results, for the docs."""

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from typing import Any

from measure import ROOT


def possible() -> bool:
    """Is there what draws? A lent machine may lack it; then `--draw` does so elsewhere."""
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def drawn(name: str, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """Axes in a row, to be filled; then they are docs/NAME.svg."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tianji"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=size, layout="constrained", squeeze=False)
    yield axes[0]
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    text = "\n".join(line.rstrip() for line in picture.getvalue().splitlines()) + "\n"
    path = ROOT / "docs" / f"{name}.svg"
    path.write_text(text)
    print(f"drawn: {path}")
