"""How far the dependencies between acting, simulating and learning are relaxed: one object.

Three edges join the three tasks: I brings parameters from learning to acting, II actions from
acting to simulating, III samples from simulating to learning. Everything here is arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, get_args


@dataclass(frozen=True)
class Relaxation:
    """A value of it is an architecture's timing; the roles are the same for all. A config's [relax]
    has these fields, but for `paced` and `window`."""

    lead: float = 0
    """updates that production may run ahead of the learner; inf: any number"""
    # A rollout for update k begins at version k - lead.
    late: Literal["wait", "pass"] = "wait"
    """wait: update k consumes exactly the rollouts granted for it; pass: the first that arrive"""
    # With "pass", later ones move on to the next update.
    take: Literal["barrier", "boundary"] = "barrier"
    """barrier: actors wait for the version that a grant asks for; boundary: never"""
    # With "boundary", a rollout begins with the newest version that the actor has received.
    start: Literal["batch", "stream"] = "batch"
    """batch: an update begins when all its rollouts are there; stream: it takes them one by one"""
    paced: bool = True
    """False: updates do not wait for new steps, so the replay ratio is left to chance"""
    window: int = 1
    """batches of which each update draws one, 1 / window of it new"""
    publish: int = 1
    """updates between two snapshots for the actors"""
    max_staleness: int | None = None
    """versions behind, at most, of what an update consumes: a guarantee; not for replay"""
    # Older ones are filtered, and counted.
    credit: int = 0
    """updates that learning may run ahead of its data; replay only"""
    # It counts from the warm-up on.
    infer: Literal["actor", "server"] = "actor"
    """actor: each chooses its own actions; server: one role does for all, in dynamic batches"""
    # The server acts with the newest version.
    max_batch: int | None = None
    """infer = server: rows inferred at once, at most; none: those of all actors"""
    max_wait: float = 0.002
    """infer = server: seconds that the first ask of a batch waits for others, at most"""
    correct: Literal["none", "clip", "vtrace", "impact", "tis"] = "none"
    """against staleness: none beyond the algorithm's own, PPO's clipped ratio, V-trace, IMPACT's
    target network, or truncated importance weights"""
    gradient: Literal["none", "gac", "age"] = "none"
    """against staleness: gac damps what repeats the last gradient, age the steps of old batches"""
    explore: Literal["alike", "ladder"] = "alike"
    """alike: one schedule for all actors; ladder: each its own constant share of random actions"""
    hosts: Literal["apart", "worker"] = "apart"
    """apart: each role in its own process; worker: actor, buffer and learner of a group in one"""
    join: Literal["none", "average", "gossip", "hogwild"] = "none"
    """how the learners of several groups become one"""

    @property
    def edges(self) -> dict[str, str]:
        """Each edge in a word: inside (a call), waiting, bounded, free, or live (parameters change
        within a rollout)."""
        if self.hosts == "worker":
            # Without locks, others change the parameters that a worker acts and learns with.
            first = "free" if self.join == "hogwild" else "inside"
            return {"I": first, "II": "inside", "III": "inside"}
        if math.isinf(self.lead):
            first = third = "free"
        elif self.lead == 0:
            first, third = "waiting", "waiting" if self.start == "batch" else "bounded"
        else:
            first = third = "bounded"
        if self.infer == "server":
            return {"I": "live", "II": "waiting", "III": third}
        return {"I": first, "II": "inside", "III": third}

    @property
    def exact(self) -> bool:
        """Does it fix what every update consumes, whatever the order of events?"""
        return self.lead == 0 and self.late == "wait" and self.paced and self.join == "none"


@dataclass(frozen=True)
class Sizes:
    """What a preset may depend on, beside its name."""

    on_policy: bool
    """each rollout is consumed soon and then gone; False: replay"""
    alone: bool
    """one host holds all roles, so that nothing runs beside anything"""
    round: int = 1
    """updates that one rollout of every actor is for, at least 1"""
    actors: int = 1
    envs: int = 1
    """of one actor"""
    groups: int = 1
    learners: int = 1
    """of one group"""


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


def gorila(sizes: Sizes) -> Relaxation:
    """Actors wait for parameters and the learner for data, of whichever actor is first."""
    return Relaxation(late="pass")


def seed(sizes: Sizes) -> Relaxation:
    """As free, but a server chooses all actions, with the newest version; V-trace on-policy."""
    return replace(free(sizes), infer="server", correct=_vtrace(sizes))


def _vtrace(sizes: Sizes) -> Literal["none", "vtrace"]:
    """Where parameters change under what acts: corrected, if each rollout is consumed once."""
    return "vtrace" if sizes.on_policy else "none"


def a3c(sizes: Sizes) -> Relaxation:
    """Each worker acts and learns in one process, on parameters that all change without locks;
    V-trace on-policy."""
    return Relaxation(hosts="worker", join="hogwild", correct=_vtrace(sizes))


def gala(sizes: Sizes) -> Relaxation:
    """Each worker acts and learns in one process, and mixes parameters with others by gossip;
    V-trace on-policy."""
    return Relaxation(hosts="worker", join="gossip", correct=_vtrace(sizes))


def apex(sizes: Sizes) -> Relaxation:
    """As free, and each actor has its own constant share of random actions, from 0.4 to 0.0007."""
    return replace(free(sizes), explore="ladder")


def impala(sizes: Sizes) -> Relaxation:
    """As free, and V-trace corrects what is stale."""
    return replace(free(sizes), correct="vtrace")


def reverb(sizes: Sizes) -> Relaxation:
    """Samples per insert are held within 2 rollouts of every actor: who is further ahead waits."""
    error = 2 * sizes.round
    return Relaxation(lead=error, late="pass", take="boundary", credit=error)


Preset = Literal[
    "sync", "periodic", "one_step", "bounded", "free", "tianji",
    "gorila", "seed", "a3c", "gala", "apex", "impala", "reverb",
]  # fmt: skip
PRESETS: dict[str, Callable[[Sizes], Relaxation]] = {
    name: globals()[name] for name in get_args(Preset)
}


def relaxation(preset: str, sizes: Sizes, fields: Mapping[str, Any]) -> Relaxation:
    """A preset with some fields set by hand; check `problem` of what comes out."""
    found = PRESETS[preset](sizes)
    if sizes.groups > 1 and found.join == "none":
        found = replace(found, join="average")
    found = replace(found, **fields)
    if "max_staleness" not in fields and found.max_staleness is not None:
        # The preset's bound is for what arrives; a window and a longer lead add their own.
        least = found.lead if math.isfinite(found.lead) else 0
        most = max(found.max_staleness, int(least)) + found.window - 1
        found = replace(found, max_staleness=most)
    return found


def problem(relax: Relaxation, sizes: Sizes) -> str | None:
    """Why this cannot work, with the consequence and the remedy; None where it can."""
    kinds = (_placement, _inference, _timing, _reuse, _bound, _mathematics)
    return next(chain.from_iterable(wrong(relax, sizes) for wrong in kinds), None)


def _placement(relax: Relaxation, sizes: Sizes) -> Iterator[str]:
    """Who lives where, and with whom."""
    if relax.hosts == "worker" and sizes.alone:
        yield (
            'relax.hosts = "worker" puts each group into a process of its own, and engine serial '
            'has one for all, so nothing would run beside anything. Set scale.engine = "local", or '
            'scale.relax = "sync".'
        )
    if relax.hosts == "worker" and sizes.learners > 1:
        yield (
            f'relax.hosts = "worker" puts the learner of a group beside its actors, and '
            f"scale.learners = {sizes.learners} in one process would wait for each other for ever. "
            f"Set scale.learners = 1, and scale.groups to as many as there are to be."
        )
    if relax.hosts == "worker" and relax.infer == "server":
        yield (
            'relax.infer = "server" takes inference out of the worker that relax.hosts = "worker" '
            "makes one process of, so it would wait for another one at every step. Set relax.infer "
            '= "actor".'
        )
    if relax.hosts == "worker" and (relax.lead > 0 or relax.publish > 1):
        yield (
            f'relax.hosts = "worker" acts and learns in turn, so relax.lead = {relax.lead:g} and '
            f"relax.publish = {relax.publish} would only make rollouts stale. Set relax.lead to 0 "
            f"and relax.publish to 1."
        )
    if relax.hosts == "worker" and not relax.paced:
        yield (
            'relax.hosts = "worker" acts and learns in turn; where updates do not wait for new '
            'steps, as in scale.relax = "free", its actor would never have its turn. Set '
            'scale.relax = "sync".'
        )
    if relax.join == "none" and sizes.groups > 1:
        yield (
            f'relax.join = "none" with scale.groups = {sizes.groups} learns {sizes.groups} models '
            f'that never meet, and only the first would be kept. Set relax.join = "average", or '
            f"start as many runs."
        )
    if relax.join == "hogwild" and relax.hosts != "worker":
        yield (
            'relax.join = "hogwild" shares parameters between workers, and relax.hosts = "apart" '
            'makes none: actors would not see what others learn. Set scale.relax = "a3c", or '
            'relax.join = "average".'
        )
    if relax.join != "none" and sizes.groups < 2:
        yield (
            f'relax.join = "{relax.join}" joins the learners of several groups, and there is one, '
            f'so it would do nothing. Set relax.join = "none", or scale.groups to 2 or more.'
        )


def _inference(relax: Relaxation, sizes: Sizes) -> Iterator[str]:
    """Who chooses actions."""
    if relax.infer == "actor":
        return
    if relax.lead == 0:
        yield (
            'relax.infer = "server" acts with the newest version at every step, so relax.lead = 0 '
            "could not be kept: rollouts would be stale. Set relax.lead to 1 or more."
        )
    if relax.take == "barrier":
        yield (
            'relax.infer = "server" acts with the newest version at every step, so no actor can '
            'wait for one: relax.take = "barrier" could not be kept. Set relax.take = "boundary".'
        )
    if relax.max_batch is not None and relax.max_batch < sizes.envs:
        yield (
            f"relax.max_batch = {relax.max_batch} is less than the {sizes.envs} envs of one actor, "
            f"which ask together: nobody would be answered. Set relax.max_batch to {sizes.envs} or "
            f"more."
        )


def _timing(relax: Relaxation, sizes: Sizes) -> Iterator[str]:
    """How far the two sides run apart."""
    lead = relax.lead
    if lead < relax.publish - 1:
        yield (
            f"relax.lead = {lead:g} with relax.publish = {relax.publish} stops the run: actors "
            f"would wait for a version that is not published. Set relax.lead to "
            f"{relax.publish - 1} or more."
        )
    if relax.take == "boundary" and lead == 0:
        yield (
            'relax.take = "boundary" never waits for a version, so relax.lead = 0 could not be '
            'kept: rollouts would be stale. Set relax.take = "barrier", or relax.lead to 1 or more.'
        )
    if not relax.paced and not sizes.on_policy and sizes.alone:
        yield (
            'scale.relax = "free" with replay needs processes: in one, the learner would never '
            'stop for the actors. Set scale.engine = "local", or scale.relax = "tianji".'
        )
    if relax.credit > 0 and (sizes.on_policy or relax.late == "wait" or not relax.paced):
        why = (
            "each rollout is consumed once, so no update can begin before its own are there"
            if sizes.on_policy
            else 'relax.late = "wait" makes every update wait for its own rollouts'
            if relax.late == "wait"
            else "updates do not wait for new steps at all"
        )
        yield f"relax.credit = {relax.credit} would do nothing: {why}. Set relax.credit to 0."


def _reuse(relax: Relaxation, sizes: Sizes) -> Iterator[str]:
    """How rollouts become batches."""
    if relax.start == "stream" and not sizes.on_policy:
        yield (
            'relax.start = "stream" takes rollouts as they arrive, but a batch from replay is '
            'drawn as a whole, so nothing would overlap. Set scale.relax = "sync" for staleness '
            '0, or "tianji".'
        )
    if relax.start == "stream" and relax.window > 1:
        yield (
            f'relax.start = "stream" with reuse.window = {relax.window} cannot be: a batch that is '
            f'drawn from several is not known before all are there. Set relax.start = "batch".'
        )
    if relax.window > 1 and not sizes.on_policy:
        yield (
            f"reuse.window = {relax.window} would do nothing: replay has a window of its own. Set "
            f"algorithm.capacity instead."
        )


def _bound(relax: Relaxation, sizes: Sizes) -> Iterator[str]:
    """What staleness may be."""
    lead, behind, most = relax.lead, relax.lead + relax.window - 1, relax.max_staleness
    if most is None:
        return
    if not sizes.on_policy:
        yield (
            f"relax.max_staleness = {most} would throw nearly all of replay away: "
            f"replay is old by design, and reports the age of what it draws. Leave it out, or "
            f"lower algorithm.capacity."
        )
    if math.isfinite(lead) and most < behind:
        yield (
            f"relax.max_staleness = {most} with relax.lead = {lead:g} and "
            f"reuse.window = {relax.window} wastes work: rollouts may be {behind:g} versions "
            f"behind, and would be made only to be thrown away. Set relax.max_staleness to "
            f"{behind:g} or more, or lower relax.lead or reuse.window."
        )
    least = relax.publish + relax.window - 2
    if most < least:
        yield (
            f"relax.max_staleness = {most} with relax.publish = {relax.publish} and "
            f"reuse.window = {relax.window} stops the run: all that actors make before the next "
            f"version is published would be thrown away. Set relax.max_staleness to {least} or "
            f"more."
        )


def _mathematics(relax: Relaxation, sizes: Sizes) -> Iterator[str]:
    """What algorithms are told to do about it."""
    if relax.correct != "none" and not sizes.on_policy:
        yield (
            f'relax.correct = "{relax.correct}" follows whole rollouts in their order, and replay '
            f'draws single steps, so nothing would be corrected. Set relax.correct = "none".'
        )
    if relax.gradient == "age" and not sizes.on_policy:
        yield (
            'relax.gradient = "age" makes steps smaller the older a batch is, and replay is '
            "thousands of versions old by design, so that hardly anything would be learnt. Set "
            'relax.gradient = "none", or "gac".'
        )
    if relax.explore == "ladder" and sizes.on_policy:
        yield (
            'relax.explore = "ladder" gives each actor its own share of random actions; an '
            "on-policy algorithm explores by its own distribution, and would learn from what it "
            'never chose. Set relax.explore = "alike".'
        )
    if relax.explore == "ladder" and relax.infer == "server":
        yield (
            'relax.explore = "ladder" needs a policy for each actor, and relax.infer = "server" '
            'has one for all, so all would explore alike. Set relax.explore = "alike".'
        )
    if relax.explore == "ladder" and sizes.actors < 2:
        yield (
            'relax.explore = "ladder" with one actor has one rung: 40 % of all actions would be '
            'random for ever. Set relax.explore = "alike", or scale.actors to 2 or more.'
        )
