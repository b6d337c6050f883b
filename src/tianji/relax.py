"""How far the dependencies between acting, simulating and learning are relaxed: one object.

Three edges join the three tasks: I brings parameters from learning to acting, II actions from
acting to simulating, III samples from simulating to learning. Everything here is arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Relaxation:
    """A value of it is an architecture's timing; the roles are the same for all."""

    lead: float = 0
    """updates that production may run ahead: a rollout for update k begins at version k - lead;
    inf: without a bound"""
    late: str = "wait"
    """"wait": update k consumes exactly the rollouts granted for it; "pass": first arrivals serve,
    later ones move on to the next update"""
    take: str = "barrier"
    """"barrier": an actor waits for the version that its grant asks for; "boundary": it begins with
    the newest that it has received"""
    start: str = "batch"
    """"batch": an update begins when all of its rollouts are there; "stream": it takes each as it
    arrives"""
    paced: bool = True
    """False: updates do not wait for new steps, so the replay ratio is left to chance"""
    window: int = 1
    """batches of which each update draws one, 1 / window of it new"""
    publish: int = 1
    """updates between snapshots"""
    max_staleness: int | None = None
    """versions behind, at most, of what an update consumes; older ones are filtered, counted"""

    @property
    def edges(self) -> dict[str, str]:
        """Each edge in a word: inside, waiting, bounded or free."""
        if math.isinf(self.lead):
            first = third = "free"
        elif self.lead == 0:
            first, third = "waiting", "waiting" if self.start == "batch" else "bounded"
        else:
            first = third = "bounded"
        return {"I": first, "II": "inside", "III": third}

    @property
    def exact(self) -> bool:
        """Does it fix what every update consumes, whatever the order of events?"""
        return self.lead == 0 and self.late == "wait" and self.paced


@dataclass(frozen=True)
class Sizes:
    """What a preset may depend on, beside its name."""

    on_policy: bool
    """each rollout is consumed soon and then gone; False: replay"""
    alone: bool
    """one host holds all roles, so that nothing runs beside anything"""
    round: int = 1
    """updates that one rollout of every actor is for, at least 1"""


def sync(sizes: Sizes) -> Relaxation:
    """Acting and learning alternate: staleness 0, replay aside."""
    return Relaxation()


def periodic(sizes: Sizes) -> Relaxation:
    """As sync, but an update takes each rollout as it arrives: the most overlap at staleness 0."""
    return Relaxation(start="stream")


def one_step(sizes: Sizes) -> Relaxation:
    """Rollouts for the next update are made during this one: staleness at most 1, replay aside."""
    return Relaxation(lead=sizes.round)


def bounded(sizes: Sizes) -> Relaxation:
    """Production runs up to 4 updates ahead (relax.lead): staleness at most that, replay aside."""
    return Relaxation(lead=4 * sizes.round)


def free(sizes: Sizes) -> Relaxation:
    """Nobody waits for anybody: staleness is reported, not bounded, and no replay ratio is kept."""
    return Relaxation(lead=math.inf, late="pass", take="boundary", paced=sizes.on_policy)


def tianji(sizes: Sizes) -> Relaxation:
    """Asynchronous and balanced: the replay ratio of a serial run for replay; on-policy, one update
    ahead, first arrivals serve, staleness at most 3. As sync where one process does all."""
    if sizes.alone:
        return Relaxation()
    if sizes.on_policy:
        return Relaxation(lead=1, late="pass", max_staleness=3)
    return Relaxation(lead=2 * sizes.round, late="pass")


PRESETS: dict[str, Callable[[Sizes], Relaxation]] = {
    "sync": sync,
    "periodic": periodic,
    "one_step": one_step,
    "bounded": bounded,
    "free": free,
    "tianji": tianji,
}


def relaxation(preset: str, sizes: Sizes, fields: Mapping[str, Any]) -> Relaxation:
    """A preset with some fields set by hand; check `problem` of what comes out."""
    found = replace(PRESETS[preset](sizes), **fields)
    if "max_staleness" not in fields and found.max_staleness is not None:
        # The preset's bound is for what arrives; a window and a longer lead add their own.
        least = found.lead if math.isfinite(found.lead) else 0
        most = max(found.max_staleness, int(least)) + found.window - 1
        found = replace(found, max_staleness=most)
    return found


def problem(relax: Relaxation, sizes: Sizes) -> str | None:
    """Why this cannot work, with the consequence and the remedy; None where it can."""
    lead, behind = relax.lead, relax.lead + relax.window - 1
    if lead < relax.publish - 1:
        return (
            f"relax.lead = {lead:g} with relax.publish = {relax.publish} stops the run: actors "
            f"would wait for a version that is not published. Set relax.lead to "
            f"{relax.publish - 1} or more."
        )
    if relax.take == "boundary" and lead == 0:
        return (
            'relax.take = "boundary" never waits for a version, so relax.lead = 0 could not be '
            'kept: rollouts would be stale. Set relax.take = "barrier", or relax.lead to 1 or more.'
        )
    if relax.start == "stream" and not sizes.on_policy:
        return (
            'relax.start = "stream" takes rollouts as they arrive, but a batch from replay is '
            'drawn as a whole, so nothing would overlap. Set scale.relax = "sync" for staleness '
            '0, or "tianji".'
        )
    if relax.start == "stream" and relax.window > 1:
        return (
            f'relax.start = "stream" with reuse.window = {relax.window} cannot be: a batch that is '
            f'drawn from several is not known before all are there. Set relax.start = "batch".'
        )
    if relax.window > 1 and not sizes.on_policy:
        return (
            f"reuse.window = {relax.window} would do nothing: replay has a window of its own. Set "
            f"algorithm.capacity instead."
        )
    if relax.max_staleness is not None and not sizes.on_policy:
        return (
            f"relax.max_staleness = {relax.max_staleness} would throw nearly all of replay away: "
            f"replay is old by design, and reports the age of what it draws. Leave it out, or "
            f"lower algorithm.capacity."
        )
    if relax.max_staleness is not None and math.isfinite(lead) and relax.max_staleness < behind:
        return (
            f"relax.max_staleness = {relax.max_staleness} with relax.lead = {lead:g} and "
            f"reuse.window = {relax.window} wastes work: rollouts may be {behind:g} versions "
            f"behind, and would be made only to be thrown away. Set relax.max_staleness to "
            f"{behind:g} or more, or lower relax.lead or reuse.window."
        )
    least = relax.publish + relax.window - 2
    if relax.max_staleness is not None and relax.max_staleness < least:
        return (
            f"relax.max_staleness = {relax.max_staleness} with relax.publish = {relax.publish} and "
            f"reuse.window = {relax.window} stops the run: all that actors make before the next "
            f"version is published would be thrown away. Set relax.max_staleness to {least} or "
            f"more."
        )
    if not relax.paced and not sizes.on_policy and sizes.alone:
        return (
            'scale.relax = "free" with replay needs processes: in one, the learner would never '
            'stop for the actors. Set scale.engine = "local", or scale.relax = "tianji".'
        )
    return None
