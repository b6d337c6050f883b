"""Where a run's time goes: what holds it up, the evidence, and what a change would bring."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tianji.flow import GAIN, LEAST, Flow
from tianji.role_names import SERIAL, WORKER, by_flow, role_kind, waiting

SAMPLE, TRAIN, COMMUNICATION, BALANCED = KINDS = (
    "sample-bound", "train-bound", "communication-bound", "balanced",
)  # fmt: skip

HARMLESS = 0.01
"""predicted loss below which something costs nothing"""
EVEN = 0.87
"""the less busy of two sides over the busier one, from which they are balanced"""
IDLE = 0.6
"""share of its time below which the busiest role is not what the others wait for"""
EFFICIENCY = 0.88
"""of its slower side's rate, what a run in processes comes to at least: the least that
benchmarks/pipeline.py has seen, rounded"""
CROWDED = 0.95
"""share of their cores that is used, from which actors have none to spare"""
NEARLY = 0.9
"""of the best that more actors could bring, what is enough"""
FAR = 64
"""actors more, at most, of which something is said"""

PAUSES = ("wait_checkpoint", "wait_turn")
"""kinds of waiting that are nobody's fault: all rest for a checkpoint; the actor is inactive"""

Time = Mapping[str, Mapping[str, float]]
"""Shares of its time, by kind, of each kind of host."""


@dataclass(frozen=True)
class Verdict:
    """What holds a run up."""

    kind: str
    """one of KINDS"""
    text: str
    """the evidence, in one line"""
    advice: tuple[str, ...] = ()
    """what would bring more than 5 %, or can be saved at no cost, by the model"""
    busy: Mapping[str, float] = field(default_factory=dict)
    """shares of their time in which actors produce, the buffer receives and the learner consumes:
    a rate over its share is what that side could do if it never waited"""

    @property
    def line(self) -> str:
        """All of it in one line."""
        advice = f": {'; '.join(self.advice)}" if self.advice else ""
        return f"{self.kind}: {self.text}{advice}"

    def tree(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text, "advice": list(self.advice)}

    def metrics(self, rates: Mapping[str, float]) -> dict[str, float]:
        """As numbers that plot: which kind it is, and what each side could do, from the `rates`
        produced, received and consumed."""
        flags = {f"verdict/{kind.replace('-', '_')}": float(kind == self.kind) for kind in KINDS}
        could = {
            f"capacity/{name}_sps": rates[name] / max(share, LEAST)
            for name, share in self.busy.items()
            if name in rates
        }
        return flags | could


@dataclass(frozen=True)
class Setting:
    """What a run is made of, as far as its bottleneck depends on it."""

    actors: int = 1
    """that are active, of all groups"""
    groups: int = 1
    cores: int = 1
    """that a learner computes with"""
    available: int = 1
    """cores that the run may use"""
    places: int = 1
    """cores that actors may run on"""
    crowd: float = 0.0
    """share of these that is used, by whomever"""
    turns: bool = False
    """do acting and learning take turns (lead 0)?"""
    grows: bool = False
    """does an update follow a rollout of each actor, so that more of them make it larger?"""
    ordered: bool = False
    """does every update wait for rollouts of its own, and so for the slowest actor?"""
    busiest: float = 0.0
    """share of its time that the busiest actor is busy"""
    scaling: Mapping[int, float] = field(default_factory=dict)
    """updates per second of a learner alone by its cores, as measured"""
    planned: bool = False
    """did a plan choose where roles run?"""
    slack: float = 0.0
    """share by which it means actors to be able to make more than is consumed"""
    rebalances: bool = False
    """does the number of active actors follow what is measured?"""
    silent: Mapping[str, float] = field(default_factory=dict)
    """hosts that work and have said nothing for so many seconds"""

    @property
    def actors_each(self) -> int:
        """Of each group."""
        return max(1, round(self.actors / self.groups))

    @property
    def where(self) -> str:
        """Where more or fewer actors are advised."""
        return " in each group" if self.groups > 1 else ""


def by_role(util: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Shares by "role/kind" as shares by kind, of each role."""
    roles: dict[str, dict[str, float]] = {}
    for key, share in util.items():
        role, _, kind = key.partition("/")
        roles.setdefault(role, {})[kind or role] = share
    return roles


def scaling_of(plan: Any) -> dict[int, float]:
    """Updates per second of a learner by its cores, where a plan has measured them."""
    rates = plan.get("rates") if isinstance(plan, Mapping) else None
    learn = rates.get("learn") if isinstance(rates, Mapping) else None
    if not isinstance(learn, Mapping):
        return {}
    return {
        int(cores): 1 / float(seconds)
        for cores, seconds in learn.items()
        if str(cores).isdecimal() and isinstance(seconds, int | float) and seconds > 0
    }


def judge(time: Time, setting: Setting | None = None) -> Verdict | None:
    """What holds a run up, from each kind of host's shares of its time; None where too little is
    known.

    A grant that is not given and a batch that is not served come from the buffer, but it only
    passes them on: unless it has no time left, the other side is whom one waits for.
    """
    setting = setting or Setting()
    if name := alone(time):
        return _in_one(name, time[name], setting)
    shares = {role: found for role, kinds in time.items() if (found := _normal(kinds))}
    return _apart(shares, setting) if len(by_flow(shares)) == 3 else None


def alone(time: Time) -> str | None:
    """The kind of host that does all in turn, if there is one."""
    return next((host for host in (SERIAL, WORKER) if host in time), None)


def _normal(kinds: Mapping[str, float]) -> dict[str, float]:
    """Shares that add up to 1, of the time without pauses."""
    found = {
        kind: share
        for kind, share in kinds.items()
        if kind not in PAUSES and math.isfinite(share) and share > 0
    }
    whole = sum(found.values())
    return {kind: share / whole for kind, share in found.items()} if whole > 0 else {}


def _waits(kinds: Mapping[str, float]) -> float:
    """Share of waiting for another role."""
    return min(1.0, waiting(kinds))


def busy(kind: str, kinds: Mapping[str, float]) -> float | None:
    """Share of its time in which a host of a kind is busy; None where it spent none, but in pauses.
    To be answered by a server is a part of producing, to wait for other groups one of learning."""
    shares = _normal(kinds)
    if not shares:
        return None
    return 1.0 - _waits(shares) + _own_waits(kind, shares)


def _own_waits(kind: str, shares: Mapping[str, float]) -> float:
    """Share of waiting that is a part of a kind's work."""
    return sum(shares.get(wait, 0.0) for wait in role_kind(kind).works_on)


def _apart(shares: Mapping[str, Mapping[str, float]], setting: Setting) -> Verdict:
    """Each role has a host of its own."""
    work = {role: 1.0 - _waits(kinds) for role, kinds in shares.items()}
    own = by_flow({role: _own_waits(role, kinds) for role, kinds in shares.items()})
    on_server, on_groups = own["produced"], own["consumed"]
    sides = by_flow(work)
    acting, receiving, learning = sides["produced"], sides["received"], sides["consumed"]
    mean = acting + on_server
    held_up = setting.ordered and setting.busiest > mean / EVEN
    busiest = min(1.0, setting.busiest) if held_up else mean
    flow = Flow(
        actors=max(LEAST, busiest),
        learner=max(LEAST, learning + on_groups),
        buffer=max(LEAST, receiving),
        turns=setting.turns,
    )
    kind = _kind(flow)
    busy = {"produced": mean, "received": receiving, "consumed": learning}
    if kind == TRAIN and on_groups > learning:
        kind = COMMUNICATION
        text = f"learners wait {_percent(on_groups)} for other groups"
    elif flow.buffer >= max(flow.actors, flow.learner):
        text = f"buffer {_percent(flow.buffer)} busy: actors and learner wait for it"
    elif setting.turns:
        text = (
            f"lead 0, each waits for the other: actors {_percent(mean)} busy, learner "
            f"{_percent(learning)} busy"
        )
    elif kind == BALANCED:
        text = f"learner {_percent(learning)} busy; actors {_percent(mean)} busy"
    elif kind == COMMUNICATION:
        text = (
            f"nobody is busy: actors {_percent(mean)}, buffer {_percent(receiving)}, learner "
            f"{_percent(learning)}: time goes by between them"
        )
    elif kind == SAMPLE and on_server > 0.5 * (1.0 - acting):
        served = f"server {_percent(work['server'])} busy; " if "server" in work else ""
        text = f"{served}actors blocked {_percent(on_server)} on server"
    elif kind == SAMPLE and held_up:
        text = f"one actor {_percent(busiest)} busy, {_percent(mean)} in the mean: all wait for it"
    elif kind == SAMPLE:
        blocked = _percent(1.0 - learning)
        text = f"actors {_percent(mean)} busy; learner blocked {blocked} on actors"
    else:
        blocked = _percent(1.0 - acting)
        text = f"learner {_percent(learning)} busy; actors blocked {blocked} on learner"
    advice = tuple(_advice(_crowded(flow, setting), setting, mean))
    return Verdict(kind, _with_silent(text, setting), advice, busy)


def _crowded(flow: Flow, setting: Setting) -> Flow:
    """The flow with what the cores can bear. Where actors share cores that have no time left, they
    are busy with waiting for each other: fewer of them would each be quicker."""
    crowd = min(1.0, setting.crowd)
    alone = crowd * setting.places / setting.actors
    shared = crowd >= CROWDED and setting.actors > setting.places
    return replace(flow, actors=min(flow.actors, alone) if shared else flow.actors, cores=crowd)


def _kind(flow: Flow, between: bool = True) -> str:
    """`between`: can time go by between the roles?"""
    acting, learning = flow.actors, flow.learner
    longer = max(acting, learning)
    if flow.buffer >= longer:
        return COMMUNICATION
    if between and (1.0 - acting - learning > longer if flow.turns else longer < IDLE):
        return COMMUNICATION
    if min(acting, learning) >= EVEN * max(acting, learning):
        return BALANCED
    return TRAIN if learning > acting else SAMPLE


def _advice(flow: Flow, setting: Setting, mean: float) -> Iterable[str]:
    """What the model says of other numbers; `mean` is the actors' share of producing, where one of
    them holds the others up."""
    N = setting.actors_each
    enough = N * (1.0 + setting.slack * (not setting.turns))
    fewer = next((k for k in range(N - 1, 0, -1) if flow.gain((N - k) / enough) > -HARMLESS), 0)
    rest = setting.rebalances and flow.cores < CROWDED  # those that are not needed rest already
    if fewer and not rest:
        actors = f"actor{'s' * (fewer > 1)}{setting.where}"
        yield f"{fewer} fewer {actors} cost{'s' * (fewer == 1)} nothing"
    if max(flow.actors, flow.learner, flow.buffer, flow.cores) < IDLE and not flow.turns:
        return  # no side is what the others wait for, so that a faster one might bring nothing
    now, more = (setting.scaling.get(setting.cores + i) for i in (0, 1))
    if now and more and (gain := flow.gain(learner=more / now)) > GAIN:
        yield f"1 more learner core = {_more(gain)}"
    if setting.ordered and not setting.turns:
        passing = replace(flow, actors=max(LEAST, min(mean, flow.actors)))
        if (gain := passing.rate() / flow.rate() - 1.0) > GAIN:
            yield f'relax.late = "pass" = {_more(gain)}'
    if setting.turns:
        gain = flow.overlapped().rate() / flow.rate() - 1.0
        if gain > GAIN and setting.available > 1:
            yield f'overlap, scale.relax = "one_step" or "tianji", = {_more(gain)}'
    yield from _more_actors(flow, setting)


def _more_actors(flow: Flow, setting: Setting) -> Iterable[str]:
    N = setting.actors_each
    best = flow.gain((N + FAR) / N)
    if best > GAIN:
        more = next(k for k in range(1, FAR + 1) if flow.gain((N + k) / N) >= NEARLY * best)
        gain = flow.gain((N + more) / N)
        larger = f" (an update then follows {(N + more) / N:.3g} times the steps)" * setting.grows
        yield f"{more} more actor{'s' if more > 1 else ''}{setting.where} = {_more(gain)}{larger}"
    elif setting.crowd >= CROWDED:
        wider = (setting.places + 1) / setting.places
        room = replace(flow, actors=flow.actors / wider, cores=flow.cores / wider)
        if (gain := room.rate() / flow.rate() - 1.0) > GAIN:
            yield f"1 more core for actors = {_more(gain)}"


def _in_one(name: str, time: Mapping[str, float], setting: Setting) -> Verdict | None:
    """One process does all, or each of several workers does: nobody waits, each takes its turn."""
    shares = _normal(time)
    if not shares:
        return None
    roles = {role: sum(kinds.values()) for role, kinds in by_role(shares).items()}
    sides = dict.fromkeys(("produced", "received", "consumed"), 0.0) | by_flow(roles)
    acting, receiving, learning = sides["produced"], sides["received"], sides["consumed"]
    passing = receiving + roles.get("driver", 0.0)
    flow = Flow(max(LEAST, acting), max(LEAST, learning), max(LEAST, passing), turns=True)
    kinds: dict[str, float] = {}
    for key, share in shares.items():
        kind = key.partition("/")[2] or key
        kinds[kind] = kinds.get(kind, 0.0) + share
    most = sorted(kinds, key=lambda kind: -kinds[kind])[:3]
    told = ", ".join(f"{kind} {_percent(kinds[kind])}" for kind in most if kinds[kind] >= 0.05)
    advice = []
    if name == SERIAL and setting.available > 1 and not setting.planned:
        beside = min(setting.actors, setting.available - 1)
        other = acting / beside + receiving
        gain = EFFICIENCY / max(learning, other, LEAST) - 1.0
        if gain > GAIN:
            advice.append(
                f'processes, scale.engine = "local" with scale.relax = "tianji", = {_more(gain)}'
            )
    where = "one process" if name == SERIAL else "each worker"
    text = _with_silent(f"{where}: {told}", setting)
    return Verdict(_kind(flow, between=False), text, tuple(advice), sides)


def _with_silent(text: str, setting: Setting) -> str:
    """A host that says nothing is in the middle of something long: that comes first."""
    told = [f"{host} in one step for {seconds:.0f} s" for host, seconds in setting.silent.items()]
    return "; ".join([*told, text])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _more(gain: float) -> str:
    """Rounded down: nothing is promised that the model does not give."""
    return f"+{math.floor(100 * gain + 1e-6)} %"
