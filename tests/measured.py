"""Profiles as if they had been measured, and what they are of."""

import os
import statistics

from tianji import planner, probe, shape
from tianji import profile as profiles
from tianji.engines.server import ForkServer
from tianji.plan import Rates
from tianji.probe import alone
from tianji.ratios import Beside, Slowed

CARTPOLE = {
    "env": {"id": "CartPole-v1"},
    "algorithm": {"name": "ppo", "epochs": 1, "minibatches": 1},
    "scale": {"envs_per_actor": 8, "rollout_length": 8},
    "stop": {"updates": 3},
}
REPLAY = {
    "env": {"id": "CartPole-v1"},
    "algorithm": {"name": "dqn", "warmup": 5000, "batch_size": 16, "new_steps": 8},
    "scale": {"envs_per_actor": 4, "rollout_length": 4},
    "stop": {"updates": 3},
}


WORKERS = ["scale.relax=gala", "scale.engine=local", "scale.groups=2"]


def a_profile(config, cores=4, **changes):
    """As if it had been measured: a slow env and a quick learner."""
    rates = Rates(
        act={n: 1e-3 * n for n in (1, 8, 512)}, begin=1e-5, send=1e-6, receive=2e-5, serve=1e-5,
        learn={1: 2e-3, 2: 1.5e-3}, take=1e-4, wake=2e-5, slow_act={1: 1.0},
        slow_learn={1: 1.0}, valid=0.9,
    )  # fmt: skip
    one = shape.template(config)
    task = shape.task_of(one, shape.see(one).env)
    facts = profiles.facts() | changes
    return profiles.Profile(rates, task, facts, profiles.subject(config), 1.0, True)


def ask(config, profile, *changes):
    """What the model says of a config with some of its choice changed."""
    return planner.what_if(config, profile, changes, None).prediction


class Counted(ForkServer):
    """What hosts are forked from, which says in a file that it was started."""

    def __init__(self, path):
        with path.open("a") as file:
            file.write("started\n")
        super().__init__()


def over_one(*took):
    return beside(*((one, 1.0) for one in took))


def beside(*pairs):
    """Updates under other circumstances, each with one under the usual ones."""
    return [Beside(took, base) for took, base in pairs]


def slowed(learn, act, slowest):
    """Beside others, where each alone takes a second."""
    return Slowed(Beside(learn, 1.0), Beside(act, 1.0), slowest)


class Told:
    """In the place of a probe: it says what it was given, one after the other."""

    def __init__(self, key, *values):
        self.key, self.values, self.busy = key, list(values), []

    def ask(self, **how):
        self.begin(**how)
        return self.end()

    def begin(self, **how):
        pass

    def end(self):
        value = self.values.pop(0)
        slices = value if isinstance(value, list) else [value] * probe.SLICES
        return {self.key: statistics.median(slices), "slices": slices}

    def ready(self):
        pass

    @property
    def has_ended(self):
        return not self.busy.pop(0) if self.busy else True


def ran(config, folder, seconds):
    """What a real run tells."""
    how = {"tree": config.tree(), "folder": str(folder), "seconds": seconds}
    return alone(probe.Running, sorted(os.sched_getaffinity(0)), **how)
