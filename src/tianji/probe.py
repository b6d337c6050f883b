"""Short measurements of real roles, each in a process of its own on cores of its own."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import select
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tianji import trace
from tianji.actor import Actor
from tianji.algorithm import Spec
from tianji.build import Built, build
from tianji.channel import Conduit, End, Inbox, Offer
from tianji.config import CheckpointConfig, Config, FaultsConfig, StopConfig, load_config
from tianji.driver import Serial
from tianji.engines.forkserver import die_with_parent
from tianji.env import Env, Score, TimeStep
from tianji.errors import Failure, Refusal
from tianji.fault import Budget
from tianji.graph import Setup, row_of
from tianji.machine import cpu_seconds, keep_memory, kept_waiting, set_threads
from tianji.relax import Relaxation
from tianji.role import Did, Role, State, generator
from tianji.role_names import WORKER, RoleName, parse_role
from tianji.run import train, warm
from tianji.shape import with_share
from tianji.transports.memory import Memory
from tianji.transports.shm import Shm
from tianji.types import STEPS, Array, Leaves, leaf, rollout_layout

Measured = dict[str, Any]
Measurement = Callable[..., Measured]
"""to be called once all is ready, as often as wanted; what it takes and returns is JSON"""

SLICES = 5
"""of a measurement, of which the median is told: others may use the machine"""
PATIENCE = 90.0
"""seconds after which a measurement hangs"""
WARM = 0.3
"""seconds for which an actor is let run before it is measured, at most"""
FAR = 1 << 40
"""steps or updates that no run makes"""
LEARNING = ("learner/take", "learner/update", "learner/push")
SHARED = ("learn", "take", "consumed")
"""of what learning tells, what is in proportion to an update's steps"""
ASKING = ("actor/ask", "actor/infer")
ANSWERING = ("server/receive", "server/load", "server/infer")
RECEIVE = Did("receive")
NO_ROLLOUT = Did(waits="actor")


class Probe:
    """A process that measures when it is asked to, on cores of its own."""

    def __init__(
        self,
        prepare: Callable[[], Measurement],
        cores: Sequence[int],
        patience: float = PATIENCE,
    ) -> None:
        """`prepare` is called there; `ready` waits until it has ended. Nothing that is asked takes
        longer than `patience` seconds."""
        down, up = os.pipe(), os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(down[1])
            os.close(up[0])
            _measure(prepare, cores, down[0], up[1], parent)
        os.close(down[0])
        os.close(up[1])
        self._down, self._up = down[1], up[0]
        self._said, self._patience = b"", patience
        self._is_ready = False

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> None:
        if not self._is_ready:
            self._line()
            self._is_ready = True

    def begin(self, **how: Any) -> None:
        """Let it measure, without waiting for it."""
        self.ready()
        with contextlib.suppress(BrokenPipeError):  # it is dead: `end` says so
            os.write(self._down, json.dumps(how).encode() + b"\n")

    def end(self) -> Measured:
        """What came of it."""
        found: Measured = json.loads(self._line())
        return found

    @property
    def has_ended(self) -> bool:
        """Would `end` return at once?"""
        return b"\n" in self._said or _readable(self._up, 0.0)

    def ask(self, **how: Any) -> Measured:
        self.begin(**how)
        return self.end()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._down)
        os.close(self._up)

    def _line(self) -> bytes:
        """What it says next; raises what it failed with."""
        end = time.monotonic() + self._patience
        while b"\n" not in self._said:
            left = end - time.monotonic()
            if left <= 0:
                raise Failure(
                    f"a measurement that was to take seconds has not ended after "
                    f"{self._patience:.0f} s, so there is no profile. Does the env hang?"
                )
            if not _readable(self._up, left):
                continue
            if not (more := os.read(self._up, 1 << 16)):
                raise Failure("a process that measured was killed, so there is no profile")
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        if line.startswith(b"refused "):
            raise Refusal(f"nothing could be measured: {json.loads(line[8:])}")
        if line.startswith(b"failed "):
            raise Failure(f"nothing could be measured: {json.loads(line[7:])}")
        return line


def alone(prepare: Callable[[], Measurement], cores: Sequence[int], /, **how: Any) -> Measured:
    """One measurement, in a process that ends with it."""
    with Probe(prepare, cores) as probe:
        return probe.ask(**how)


def _readable(fd: int, seconds: float) -> bool:
    waiting = select.poll()  # select() knows no descriptor from 1024 on
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(1e3 * seconds))


def _measure(
    prepare: Callable[[], Measurement], cores: Sequence[int], down: int, up: int, parent: int
) -> None:
    """The child's whole life."""
    code = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers, and ends this
        os.sched_setaffinity(0, cores)
        set_threads(1)
        keep_memory()
        measurement = prepare()
        os.write(up, b"ready\n")
        for how in os.fdopen(down):
            os.write(up, json.dumps(measurement(**json.loads(how))).encode() + b"\n")
        code = 0
    except Refusal as error:
        os.write(up, b"refused " + json.dumps(str(error)).encode() + b"\n")
    except Failure as error:  # it says what is the matter
        os.write(up, b"failed " + json.dumps(str(error)).encode() + b"\n")
    except BaseException as error:
        traceback.print_exc()
        os.write(up, b"failed " + json.dumps(f"{type(error).__name__}: {error}").encode() + b"\n")
    finally:
        os._exit(code)


class Slice:
    """A while in which one measures: what others took of it does not count."""

    def __init__(self, driver: Serial) -> None:
        driver.start()
        self._driver = driver
        self._waited = kept_waiting()

    def seconds(self, *keys: str) -> float:
        """Spent on these, by the driver's account."""
        spent, elapsed = self._driver.seconds, self._driver.elapsed
        kept = 1.0 - (kept_waiting() - self._waited) / elapsed if elapsed > 0 else 1.0
        return max(0.05, kept) * sum(spent.get(key, 0.0) for key in keys)


class Sink:
    """In the place of a buffer: it takes what an actor makes and asks for more."""

    name = RoleName("sink")

    def __init__(self, lane: Inbox) -> None:
        self.rollouts = self.rows = self.valid = 0
        self._lane = lane

    def step(self) -> Did:
        if (slot := self._lane.probe()) is None:
            if not self._lane.out:
                self._lane.grant(0)
                return RECEIVE
            return NO_ROLLOUT
        self.rollouts += 1
        self.rows += slot.leaf("valid").size
        self.valid += int(slot.leaf("head")[STEPS])
        self._lane.release(slot)
        self._lane.grant(0)
        return RECEIVE

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        pass

    def close(self) -> None:
        pass


class Enduring(Serial):
    """Steps roles as long as envs do not fail more often than a run would let them."""

    def __init__(self, roles: Sequence[Role], actor: Actor, faults: FaultsConfig) -> None:
        super().__init__(roles)
        self._actor = actor
        self._budget = Budget(faults.env_restarts, faults.window)

    def step(self) -> Did:
        did = super().step()
        if (fault := self._actor.fault) is not None:
            self._actor.fault = None
            if not self._budget.spend():
                print(fault.traceback, file=sys.stderr)
                raise Refusal(
                    f"{fault.cause}. It failed more often than the {self._budget} that a run bears "
                    f"(faults.env_restarts). Correct the env's step, then measure."
                )
        return did


def acting(config: Config, envs: int) -> Measurement:
    """An actor with so many envs and nobody to wait for: seconds of a step of all of them, also
    slice by slice, what of it is inference, what share of it the actor leaves its core to others,
    what a rollout takes beside its steps, and the share of steps that are not resets. Takes
    `seconds` to measure for."""
    halves = config.scale.halves and envs > 1
    of_config = config.scaled(engine="local", actors=1, envs_per_actor=envs, halves=halves)
    scale = of_config.scale

    def make(num_envs: int) -> Env:
        return config.env.make(num_envs, False, scale.env_threads, scale.halves)

    env = make(envs)
    spec = _spec(of_config, env)
    setup = Setup(spec, Relaxation(), config.algorithm.describe(spec))
    lane = Conduit("rollouts-0", "lane", rollout_layout(row_of(setup), spec.T, envs), 2)
    newest = Conduit("snapshots", "newest", setup.description.params)
    transport = Memory()
    policy = config.algorithm.policy(dataclasses.replace(spec, actor=0))
    params = config.algorithm.trainer(spec).params(0)
    transport.publisher(newest).push(0, params)
    actor = Actor(
        index=0,
        env=env,
        policy=policy,
        rollouts=transport.outbox(lane),
        snapshots=transport.subscriber(newest),
        behind=math.inf,
        rng=generator(config.seed, "actor"),
        seed=config.seed,
        make=make,
        halves=scale.halves,
    )
    sink = Sink(transport.inbox(lane))
    driver = Enduring([actor, sink], actor, config.faults)
    deadline = time.perf_counter() + WARM
    while sink.rollouts < 2 and time.perf_counter() < deadline:
        driver.step()

    def measure(seconds: float) -> Measured:
        steps: list[float] = []
        inferences, loads = [], []
        driver.start()
        late = driver.now + 2 * seconds
        begun, computed, waited = driver.now, cpu_seconds(), kept_waiting()
        for _ in range(SLICES):
            if steps and driver.now > late:  # a step takes long: what one tells is enough
                break
            part = Slice(driver)
            made, last = 0, actor.steps
            rollouts, end = sink.rollouts, driver.now + seconds / SLICES
            while driver.now < end or not made:
                driver.step()
                made += max(0, actor.steps - last)  # envs that are built anew begin at 0
                last = actor.steps
            worked = part.seconds("actor/infer", "actor/simulate")
            steps.append(worked / made)
            inferences.append(part.seconds("actor/infer") / made)
            if sink.rollouts > rollouts:
                loads.append(part.seconds("actor/load", "actor/push") / (sink.rollouts - rollouts))
        could = driver.now - begun - (kept_waiting() - waited)
        return {
            "rests": max(0.0, 1.0 - (cpu_seconds() - computed) / could) if could > 0 else 0.0,
            "step": statistics.median(steps),
            "slices": steps + steps[-1:] * (SLICES - len(steps)),
            "infer": statistics.median(inferences),
            "load": statistics.median(loads) if loads else 0.0,
            "valid": sink.valid / sink.rows if sink.rows else 1.0,
        }

    return measure


def _spec(config: Config, env: Env) -> Spec:
    """The algorithm's, whether or not it could learn from rollouts of this size."""
    scale, stop = config.scale, config.stop
    return Spec(
        env=env.spec, network=config.network, actors=1, envs=scale.envs_per_actor,
        T=scale.rollout_length, seed=config.seed, updates=stop.updates,
        steps=stop.steps, window=config.reuse.window,
        correct=config.relax.correct or "none", explore="alike",
    )  # fmt: skip


class Repeated:
    """A few envs that are shown as many, where learning is measured and envs take long to make: it
    does not mind that some see the same."""

    def __init__(self, env: Env, num_envs: int) -> None:
        self.spec, self.num_envs = env.spec, num_envs
        self._env = env
        self._which = np.arange(num_envs) % env.num_envs

    def reset(self, seed: int) -> Leaves:
        return self._shown(self._env.reset(seed))

    def step(self, action: Array) -> TimeStep:
        step = self._env.step(action[: self._env.num_envs])
        reward, terminated, truncated, valid = (column[self._which] for column in step[1:5])
        score = Score(*(None if column is None else column[self._which] for column in step.score))
        observation = self._shown(step.observation)
        return TimeStep(observation, reward, terminated, truncated, valid, score)

    def render(self) -> Array:
        return self._env.render()

    def close(self) -> None:
        self._env.close()

    def _shown(self, observation: Leaves) -> Leaves:
        return {name: column[self._which] for name, column in observation.items()}


class Shown:
    """Envs whose first steps are shown again and again, where learning is measured and a step takes
    long. Episodes end after so many steps, all at once."""

    EPISODE = 32

    def __init__(self, env: Env, steps: int) -> None:
        """So many of them are real, at least one."""
        self.spec, self.num_envs = env.spec, env.num_envs
        self._env, self._real = env, max(1, steps)
        self._kept: list[TimeStep] = []
        self._steps = 0

    def reset(self, seed: int) -> Leaves:
        self._steps = 0
        return self._env.reset(seed)

    def step(self, action: Array) -> TimeStep:
        if len(self._kept) < self._real:
            self._kept.append(copy.deepcopy(self._env.step(action)))
        self._steps += 1
        observation, reward = self._kept[self._steps % len(self._kept)][:2]
        ends, begins = (np.full(self.num_envs, self._steps % self.EPISODE == i) for i in (0, 1))
        if begins[0] and self._steps > 1:  # a step that only reset
            return TimeStep(observation, np.zeros_like(reward), ~begins, ~begins, ~begins)
        whole = np.ones(self.num_envs, np.bool_)
        return TimeStep(observation, reward, ends, ~whole, whole)

    def render(self) -> Array:
        return self._env.render()

    def close(self) -> None:
        self._env.close()


def learning(
    config: Config, most_envs: int, real_steps: int | None = None, share: int = 1
) -> Measurement:
    """All roles of a run in one process, with as many threads as it has cores: seconds of an
    update, of what the buffer does for a rollout and for an update, and of a step of the actor; if
    there is a server, also what of that is to ask it and to answer. At most so many real envs are
    made, which make so many real steps, if that is given. Where an update would take long, it has
    one of so many shares of its steps, and what it takes is told in proportion; what is told of a
    step is of `envs`, which are fewer then. Takes `cores` and `seconds` to measure with and for."""
    config = with_share(config, share)
    if config.scale.envs_per_actor > most_envs or real_steps is not None:
        config = config.scaled(halves=False, env_threads=1)

    def make(num_envs: int) -> Env:
        few = config.env.make(min(num_envs, most_envs), False, scale.env_threads, scale.halves)
        if real_steps is not None:
            few = Shown(few, real_steps)
        return few if few.num_envs == num_envs else Repeated(few, num_envs)

    scale = config.scale
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    built = build(config, make)
    (actor,) = built.actors
    built.learner.begin()
    driver = Enduring(built.roles, actor, config.faults)
    _until_updates(driver, built, 1)

    def measure(cores: Sequence[int], seconds: float) -> Measured:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        found: dict[str, list[float]] = {}
        updates_each, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end or not found:
            part = Slice(driver)
            received, version = built.buffer._balance.received, built.learner.version
            consumed, steps = built.learner.consumed, actor.steps
            updates_each += 1
            _until_updates(driver, built, updates_each)
            updates = built.learner.version - version
            spent = {
                "learn": (updates, LEARNING),
                "take": (updates, ("learner/take",)),
                "serve": (updates, ("buffer/serve", "buffer/prioritize")),
                "receive": (
                    built.buffer._balance.received - received, ("buffer/receive", "buffer/grant")
                ),
                "act": (actor.steps - steps, ("actor/simulate", *ASKING, *ANSWERING)),
                "ask": (actor.steps - steps, ASKING),
                "answer": (actor.steps - steps, ANSWERING),
            }  # fmt: skip
            for name, (times, keys) in spent.items():
                if times > 0:
                    found.setdefault(name, []).append(part.seconds(*keys) / times)
            found.setdefault("consumed", []).append((built.learner.consumed - consumed) / updates)
        whole = {name: statistics.median(values) for name, values in found.items()}
        whole |= {name: share * whole[name] for name in SHARED if name in whole}
        return whole | {"envs": config.scale.envs_per_actor}

    return measure


class Running:
    """A measurement: real runs. Seconds of an update of the learner, in its own process; of the
    first one where several share every batch, its waiting for the others' sums included; where
    workers do all in turn, from one update to the next, in their mean; None where none was made.
    And of a step of the first actor, its waiting for a server included."""

    def __init__(self) -> None:
        self._warm = warm()
        self._warm.__enter__()  # as long as this process lives

    def __call__(self, tree: dict[str, Any], folder: str, seconds: float) -> Measured:
        """Of a config's `tree`, in a `folder`."""
        config = load_config(tree)
        stop = config.stop  # an end that schedules know of stays one, and is never reached
        steps, updates = (None if end is None else FAR for end in (stop.steps, stop.updates))
        bounded = dataclasses.replace(
            config,
            stop=StopConfig(seconds=seconds, steps=steps, updates=updates),
            checkpoint=CheckpointConfig(store="never", seconds=math.inf),
        )
        run = Path(train(bounded, runs=folder).run_dir)
        tracks = {parse_role(track.host): track for track in trace.read(run)}
        if workers := [track for host, track in tracks.items() if host.kind == WORKER]:
            return {"update": _traced_rounds(workers), "step": None}
        update = _traced_update(tracks[RoleName("learner")])
        return {"update": update, "step": _traced_step(tracks[RoleName("actor")])}


def _traced_update(track: trace.Track) -> float | None:
    """Seconds of an update by a learner's trace; its first one does not count, if there are more.
    None: there was none."""
    mine = {i: key for i, key in enumerate(track.keys) if key in LEARNING}
    ends = track.end[np.isin(track.key, [i for i in mine if mine[i] == "learner/update"])]
    if not len(ends):
        return None
    begin = ends[0] if len(ends) > 1 else 0.0
    own = np.isin(track.key, list(mine)) & (track.begin >= begin) & (track.end <= ends[-1])
    return float((track.end - track.begin)[own].sum()) / max(1, len(ends) - 1)


def _traced_rounds(workers: Sequence[trace.Track]) -> float | None:
    """Seconds from one update to the next, by the traces of all workers: the first ones do not
    count, as others may not have begun. None: somebody made less than three."""
    ends = [track.end[np.asarray(track.keys)[track.key] == "learner/update"] for track in workers]
    if min(len(found) for found in ends) < 3:
        return None
    begin = max(found[1] for found in ends)
    rounds = [np.diff(found[found >= begin]) for found in ends]
    if not all(len(found) for found in rounds):
        return None
    return statistics.harmonic_mean([float(found.mean()) for found in rounds])  # of the rates


def _traced_step(track: trace.Track) -> float | None:
    """Seconds of a step by an actor's trace; None: it made none."""
    keys = np.asarray(track.keys)[track.key]
    mine = np.isin(keys, ["actor/simulate", "actor/wait_server", *ASKING])
    steps = int((keys == "actor/simulate").sum())
    return float((track.end - track.begin)[mine].sum()) / steps if steps else None


def _until_updates(driver: Serial, built: Built, updates: int) -> None:
    version = built.learner.version + updates
    while built.learner.version < version:
        driver.step()


def channel(cores: Sequence[int]) -> Measurement:
    """Two processes and a conduit between them: seconds that a push takes, that its receipt takes,
    and from a push until the other side has noticed. The other one runs on `cores`. Takes `seconds`
    to measure for, once."""
    transport = Shm()
    layout = {"head": leaf((8,), np.int64)}
    there, back = (Conduit(name, "queue", layout, 16) for name in ("there", "back"))
    for conduit in (there, back):
        transport.open(conduit)
    offer = transport.offer([End(there.name, "receive"), End(back.name, "send")], 0)
    pid = os.fork()
    if pid == 0:
        _echo(offer, there, back, cores)
    offer.close()
    outbox, inbox = transport.outbox(there), transport.inbox(back)
    inbox.grant(0)

    def measure(seconds: float) -> Measured:
        round_trips: list[float] = []
        pushes: list[float] = []
        probes: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not round_trips:
            while not (granted := outbox.granted()):
                transport.wait(1.0)
            slot = granted[0]
            begun = time.perf_counter()
            outbox.push(slot)
            pushes.append(time.perf_counter() - begun)
            while True:
                seen = time.perf_counter()
                if (answer := inbox.probe()) is not None:
                    break
                transport.wait(1.0)
            inbox.release(answer)
            inbox.grant(0)
            now = time.perf_counter()
            probes.append(now - seen)
            round_trips.append(seen - begun)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return {
            "push": statistics.median(pushes),
            "receive": statistics.median(probes),
            "wake": statistics.median(round_trips) / 2,
        }

    return measure


def _echo(offer: Offer, there: Conduit, back: Conduit, cores: Sequence[int]) -> None:
    """The other process: it sends everything back."""
    try:
        transport = Shm()
        transport.accept(offer)
        os.sched_setaffinity(0, cores)
        die_with_parent(os.getppid())
        inbox, outbox = transport.inbox(there), transport.outbox(back)
        inbox.grant(0)
        while True:
            if (slot := inbox.probe()) is None:
                transport.wait(1.0)
                continue
            inbox.release(slot)
            inbox.grant(0)
            while not (granted := outbox.granted()):
                transport.wait(1.0)
            outbox.push(granted[0])
    finally:
        os._exit(1)
