"""Draws the architectures from the graphs that the code makes: `python docs/pictures.py`.

architectures/NAME.svg: hosts, roles, what travels between them, and how far each edge is relaxed.
With --check it writes nothing, and ends with 1 where a picture is not in step with the code.
"""

import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

from tianji.build import look
from tianji.config import Config, load_config
from tianji.graph import Graph, Setup, exchange
from tianji.role_names import RoleName

FOLDER = Path(__file__).resolve().parent / "architectures"

REPLAY = ("gorila", "apex", "reverb")
"""presets that are drawn with DQN, the others with PPO"""

DRAWN: dict[str, dict[str, object]] = {
    "serial": {"engine": "serial", "relax": "sync"},
    **{
        name: {"relax": name, "actors": 2}
        for name in ("sync", "periodic", "one_step", "bounded", "free", "tianji",
                     "gorila", "seed", "apex", "impala", "reverb")
    },
    "a3c": {"relax": "a3c", "groups": 2},
    "gala": {"relax": "gala", "groups": 3},
    "groups": {"relax": "tianji", "groups": 2},
    "learners": {"relax": "tianji", "actors": 2, "learners": 2},
}  # fmt: skip
"""what is drawn: a name, and what [scale] says"""

STYLES = {
    "inside": ("#7a7a7a", ""),
    "waiting": ("#c0392b", ""),
    "bounded": ("#b9770e", "9 4"),
    "free": ("#1e8449", "2 4"),
    "live": ("#7d3c98", "12 3 2 3"),
}
"""colour and dashes of an edge, by how far it is relaxed"""

WIDTH, BOX, HIGH = 760, 128, 40
COLUMNS = {"actor": 34, "buffer": 306, "server": 306, "learner": 566}
ROW, TOP, HEAD = 84, 14, 20
"""pixels from one row to the next, above the first, and of a host's name"""
DOES = {"server": "chooses", "buffer": "holds, grants", "learner": "learns"}
FONT = 'font-family="Helvetica, Arial, sans-serif"'


class Picture:
    """Shapes that are drawn: hosts first, then what travels, then roles and words."""

    def __init__(self) -> None:
        self.layers: tuple[list[str], ...] = ([], [], [], [])
        self.height = 0.0

    def box(self, layer: int, x: float, y: float, w: float, h: float, look: str) -> None:
        self.layers[layer].append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" {look}/>'
        )
        self.height = max(self.height, y + h)

    def text(self, x: float, y: float, words: str, size: int = 11, look: str = "") -> None:
        self.layers[3].append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" {FONT} {look}>{escape(words)}</text>'
        )

    def arrow(self, points: list[tuple[float, float]], style: str, both: bool = False) -> None:
        colour, dashes = STYLES[style]
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        start = f' marker-start="url(#{style})"' if both else ""
        self.layers[1].append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dashes}" stroke-linejoin="round" '
            f'marker-end="url(#{style})"{start}/>'
        )
        self.height = max(self.height, *(y for _, y in points))

    def label(self, x: float, y: float, words: str, style: str, ground: str = "none") -> None:
        """Words; on a ground, where a line would run through them."""
        w = 5.2 * len(words) + 6
        if ground != "none":
            self.box(2, x - w / 2, y - 8, w, 12, f'fill="{ground}" stroke="none"')
        self.text(x, y + 1, words, 10, f'text-anchor="middle" fill="{STYLES[style][0]}"')

    def svg(self, title: str) -> str:
        y = self.height + 26
        x = 34.0
        for name, (colour, dashes) in STYLES.items():
            self.layers[3].append(
                f'<line x1="{x:g}" y1="{y - 4:g}" x2="{x + 34:g}" y2="{y - 4:g}" '
                f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
            )
            self.text(x + 40, y, name, 10, f'fill="{colour}"')
            x += 98
        self.box(3, x + 10, y - 12, 22, 14, 'fill="#eef1f5" stroke="#9aa5b1"')
        self.text(x + 38, y, "a host", 10, 'fill="#333"')
        self.box(3, x + 92, y - 12, 22, 14, 'fill="white" stroke="#333"')
        self.text(x + 120, y, "a role", 10, 'fill="#333"')
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
            for name, (colour, _) in STYLES.items()
        )
        high = y + 14
        shapes = "\n".join(shape for layer in self.layers for shape in layer)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high:g}" '
            f'width="{WIDTH}" height="{high:g}" role="img">\n<title>{escape(title)}</title>\n'
            f"<defs>{heads}</defs>\n"
            f'<rect width="{WIDTH}" height="{high:g}" fill="white"/>\n{shapes}\n</svg>\n'
        )


Places = dict[RoleName, tuple[float, float]]
"""where the boxes of roles are"""


class Drawn(NamedTuple):
    """What is drawn, as the code makes it."""

    config: Config
    setup: Setup
    graph: Graph

    @property
    def alone(self) -> bool:
        return self.config.scale.engine == "serial"

    @property
    def serves(self) -> bool:
        return self.setup.relax.infer == "server"

    @property
    def edges(self) -> dict[str, str]:
        """Each edge in a word; in one process all three are calls."""
        return dict.fromkeys(("I", "II", "III"), "inside") if self.alone else self.setup.relax.edges

    def joined(self, what: str) -> bool:
        return any(joint.what == what for joint in self.graph.joints)


def made(name: str) -> Drawn:
    scale = {"engine": "local", "envs_per_actor": 4, "rollout_length": 4} | DRAWN[name]
    config = load_config(
        {
            "env": {"id": "CartPole-v1"},
            "algorithm": {"name": "dqn" if name in REPLAY else "ppo"},
            "scale": scale,
            "stop": {"updates": 1},
        },
        available=64,
    )
    return Drawn(config, *look(config))


def draw(name: str) -> str:
    run, picture = made(name), Picture()
    spec, graph, places = run.setup.spec, run.graph, Places()
    top, rows = TOP + 0.0, max(spec.actors, spec.learners, 2 if run.serves else 1)
    for group in range(spec.groups):
        for role in graph.roles_of(group):
            same = len(graph.roles_of(group, role.kind))
            shift = 1.0 if role.kind == "server" else 0.0 if run.serves else (rows - same) / 2
            places[role] = (COLUMNS[role.kind], top + HEAD + (role.index + shift) * ROW)
        top += rows * ROW + (26 if spec.groups > 1 else 12)
        hosts_of(picture, run, group, places)
        travel(picture, run, group, places)
    joins(picture, run, places)
    return picture.svg(f"The architecture {name}: hosts, roles and edges")


def hosts_of(picture: Picture, run: Drawn, group: int, places: Places) -> None:
    hosts = {host: run.graph.hosts[host] for host in run.graph.hosts_of(group)}
    if run.alone:
        hosts = {"one process": tuple(run.graph.roles_of(group))}
    for host, roles in hosts.items():
        corners = [places[role] for role in roles]
        left, high = (min(corner[i] for corner in corners) for i in (0, 1))
        right, low = (max(corner[i] for corner in corners) for i in (0, 1))
        picture.box(
            0, left - 10, high - HEAD, right - left + BOX + 20, low - high + HIGH + HEAD + 10,
            'fill="#eef1f5" stroke="#9aa5b1"',
        )  # fmt: skip
        picture.text(left - 2, high - 6, host, 10, 'fill="#5f6b7a"')
        for role, (x, y) in zip(roles, corners, strict=True):
            does = DOES.get(role.kind, "simulates" if run.serves else "chooses, simulates")
            picture.box(2, x, y, BOX, HIGH, 'fill="white" stroke="#333"')
            middle = 'text-anchor="middle" fill="#111"'
            picture.text(x + BOX / 2, y + 17, role.kind, 12, f'{middle} font-weight="bold"')
            picture.text(x + BOX / 2, y + 32, does, 10, 'text-anchor="middle" fill="#555"')


def travel(picture: Picture, run: Drawn, group: int, places: Places) -> None:
    """What the roles of a group send each other."""
    first, second, third = (run.edges[edge] for edge in ("I", "II", "III"))
    actors, learners, (buffer,) = (
        [places[role] for role in run.graph.roles_of(group, kind)]
        for kind in ("actor", "learner", "buffer")
    )
    learner = learners[0]
    low = HIGH - 12 if run.serves else HIGH / 2
    for x, y in actors:
        into = (buffer[0], buffer[1] + (12 if run.serves else HIGH / 2))
        picture.arrow([(x + BOX, y + (12 if run.serves else low)), into], third)
    middle = sum(y for _, y in actors) / len(actors)
    if run.serves:
        picture.label(
            (actors[0][0] + BOX + buffer[0]) / 2, buffer[1] + 4, f"rollouts, III {third}", third
        )
    else:
        picture.label(
            (actors[0][0] + BOX + buffer[0]) / 2 - (4 if len(actors) > 1 else 0),
            middle + (HIGH / 2 + 3 if len(actors) > 1 else 12),
            f"rollouts, III {third}",
            third,
        )
    for x, y in learners:
        picture.arrow([(buffer[0] + BOX, buffer[1] + HIGH / 2), (x, y + HIGH / 2)], third)
    between = sum(y for _, y in learners) / len(learners) + HIGH / 2
    picture.label(
        (buffer[0] + BOX + learner[0]) / 2 - (4 if len(learners) > 1 else 0),
        (between + buffer[1] + HIGH / 2) / 2 + (3 if len(learners) > 1 else -8),
        f"batches, III {third}",
        third,
    )
    if len(learners) > 1:
        x = learner[0] + BOX / 2
        picture.arrow([(x, learner[1] + HIGH), (x, learners[1][1])], "waiting", both=True)
        picture.label(x + 34, learner[1] + HIGH + 20, "gradients", "waiting")
    if run.serves:
        server = places[run.graph.roles_of(group, "server")[0]]
        for x, y in actors:
            ends = [(x + BOX, y + low), (server[0], server[1] + HIGH - 12)]
            picture.arrow(ends, second, both=True)
        between = (actors[0][0] + BOX + server[0]) / 2
        picture.label(between, server[1] + HIGH + 6, f"asks, answers, II {second}", second)
        x, y = learner[0] + BOX / 2, server[1] + HIGH / 2
        picture.arrow([(x, learner[1] + HIGH), (x, y), (server[0] + BOX, y)], first)
        picture.label((server[0] + BOX + x) / 2 + 20, y - 6, f"snapshots, I {first}", first)
        return
    # Snapshots go back underneath, from the first learner to every actor's left side.
    last = max(y for _, y in [*actors, *learners]) + HIGH
    y, left = last + 22, actors[0][0] - 18
    inside = run.setup.relax.hosts == "worker" or run.alone
    if inside:
        y = last + 6  # below the boxes, within the host
        x = learner[0] + 20
        back = [(x, last), (x, y), (actors[0][0] + 20, y), (actors[0][0] + 20, last)]
        picture.arrow(back, "inside")
        told = "snapshots" if run.joined("shared") else "snapshots, I inside"
        picture.label((x + actors[0][0]) / 2 + 30, y + 2, told, "inside", "#eef1f5")
        return
    out = learner[0] + 20 if len(learners) == 1 else learner[0] - 16
    begin = [(out, learner[1] + HIGH)] if len(learners) == 1 else [(learner[0], learner[1] + 30)]
    begin += [] if len(learners) == 1 else [(out, learner[1] + 30)]
    for x, at in actors:
        picture.arrow([*begin, (out, y), (left, y), (left, at + 12), (x, at + 12)], first)
    picture.label((out + left) / 2, y + 3, f"snapshots, I {first}", first, "white")


def joins(picture: Picture, run: Drawn, places: Places) -> None:
    """What the learners of several groups have in common."""
    groups = range(run.setup.spec.groups)
    heights = [places[run.graph.roles_of(group, "learner")[0]][1] for group in groups]
    if len(groups) == 1:
        return
    right = COLUMNS["learner"] + BOX
    if run.joined("shared"):
        x, y = right + 24, (heights[0] + heights[-1]) / 2
        for height in heights:
            picture.arrow([(right, height + 14), (x + 18, y + (0 if height < y else HIGH))], "free",
                          both=True)  # fmt: skip
        dashes = 'fill="white" stroke="#333" stroke-dasharray="4 3"'
        picture.box(2, x - 8, y, 50, HIGH, dashes)
        picture.text(x + 17, y + 17, "shared", 10, 'text-anchor="middle" fill="#111"')
        picture.text(x + 17, y + 30, "memory", 10, 'text-anchor="middle" fill="#111"')
        picture.label(x - 60, y + 24, "parameters, I free", "free")
        return
    models = [joint for joint in run.graph.joints if joint.what == "models"]
    pairs = [(j.sender.group or 0, j.receivers[0].group or 0) for j in models if j.sender]
    joined = exchange(run.config, run.setup.relax)
    assert joined is not None
    patience = joined.patience
    for i, j in pairs:
        y, to = heights[i], heights[j]
        style = "waiting" if patience == 0 else "free" if patience == float("inf") else "bounded"
        if (j, i) in pairs:  # both ways, side by side
            at = right - (28 if i < j else 58)
            ends = [(at, y + HIGH), (at, to)] if i < j else [(at, y), (at, to + HIGH)]
            picture.arrow(ends, style)
        elif j == i + 1:
            picture.arrow([(right - 28, y + HIGH), (right - 28, to)], style)
        else:
            out = right + 22
            picture.arrow([(right, y + 20), (out, y + 20), (out, to + 20), (right, to + 20)], style)
    y, to = heights[:2]
    picture.label(right - 92, (y + to + HIGH) / 2 + 8, f"models, {style}", style)


def drawn() -> dict[str, str]:
    return {name: draw(name) for name in DRAWN}


def main(check: bool) -> int:
    pictures = drawn()
    there = {path.stem: path.read_text() for path in FOLDER.glob("*.svg")}
    behind = sorted(n for n in pictures.keys() | there.keys() if pictures.get(n) != there.get(n))
    if behind and check:
        print(f"{', '.join(behind)}: not in step with the code; run `python docs/pictures.py`")
    elif behind:
        FOLDER.mkdir(exist_ok=True)
        for name in behind:
            if name in pictures:
                (FOLDER / f"{name}.svg").write_text(pictures[name])
            else:
                (FOLDER / f"{name}.svg").unlink()
        print(f"{', '.join(behind)}: written")
    return int(check and bool(behind))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
