"""Who waits for whom, in one line: where a run's time goes."""

from __future__ import annotations

from collections.abc import Mapping

WHOLE = 0.9
"""share of a role's time from which it is all of a host's: less, and roles share one"""

BUSY = 0.85
"""share of its time from which a role counts as the bottleneck's own work"""


def by_role(util: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Shares by "role/kind" as shares by kind, of each role."""
    roles: dict[str, dict[str, float]] = {}
    for key, share in util.items():
        role, _, kind = key.partition("/")
        roles.setdefault(role, {})[kind or role] = share
    return roles


def verdict(time: Mapping[str, Mapping[str, float]]) -> str:
    """The bottleneck and who waits for it, from each kind of host's shares of its time; empty where
    one process does all, so that nobody waits for anybody.

    A grant that is not given and a batch that is not served come from the buffer, but it only
    passes them on: unless it has no time left, the other side is whom one waits for.
    """
    loop = [time.get(role, {}) for role in ("actor", "buffer", "learner")]
    if any(sum(kinds.values()) < WHOLE for kinds in loop):
        return ""
    busy = {role: 1.0 - sum(_waits(kinds).values()) for role, kinds in time.items()}
    if busy["buffer"] >= BUSY:
        return f"buffer {busy['buffer']:.0%} busy: actors and learner wait for it".replace(
            "%", " %"
        )
    actors, learner = busy["actor"], busy["learner"]
    if min(actors, learner) >= BUSY:
        text = f"learner {learner:.0%} busy; actors {actors:.0%} busy: balanced"
    elif (on_server := time["actor"].get("wait_server", 0.0)) > 0.5 * (1.0 - actors):
        text = f"server {busy['server']:.0%} busy; actors blocked {on_server:.0%} on server"
    elif learner >= actors:
        blocked = sum(_waits(time["actor"]).values())
        text = f"learner {learner:.0%} busy; actors blocked {blocked:.0%} on learner"
    else:
        blocked = sum(_waits(time["learner"]).values())
        text = f"actors {actors:.0%} busy; learner blocked {blocked:.0%} on actors"
    return text.replace("%", " %")


def _waits(kinds: Mapping[str, float]) -> dict[str, float]:
    """Shares of waiting for another role."""
    return {kind: share for kind, share in kinds.items() if kind.startswith("wait_")}
