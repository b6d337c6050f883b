"""Configs: TOML into typed, checked dataclasses; every value knows where it came from."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import math
import textwrap
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tianji.algorithm import (
    Algorithm,
    Bound,
    Count,
    Network,
    NotNegative,
    Positive,
    Whole,
    algorithm_class,
)
from tianji.annotated import Codec
from tianji.env import Env, Wrapper, import_modules, make_env
from tianji.errors import Refusal, nearest
from tianji.machine import cores
from tianji.relax import Preset, Relaxation
from tianji.trigger import TRIGGERS


@dataclass(frozen=True)
class EnvConfig:
    """The environment."""

    id: str
    """a Gymnasium id, or the name of a registered environment"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """arguments of the environment's constructor"""
    imports: tuple[str, ...] = ()
    """modules to import first, so that the environments and algorithms in them are known"""
    wrappers: tuple[Wrapper, ...] = ()
    """wrappers of Gymnasium, inner first: names, or tables of a name and arguments"""
    time_limit: Count | None = None
    """steps after which an episode is cut"""
    clip_reward: Positive | None = None
    """rewards are cut at this size, up and down; returns are reported as they were"""
    clip_observation: Positive | None = None
    """observations are cut at this size, up and down"""
    frame_stack: Count = 1
    """observations that a policy sees at once, the newest last; each is held once"""

    def make(
        self, num_envs: int, render: bool = False, threads: int = 1, halves: bool = False
    ) -> Env:
        """The env as this says: for actors, for the evaluator, and for what comes after."""
        return make_env(
            self.id,
            num_envs,
            self.kwargs,
            render,
            wrappers=self.wrappers,
            time_limit=self.time_limit,
            clip_reward=self.clip_reward,
            clip_observation=self.clip_observation,
            frame_stack=self.frame_stack,
            threads=threads,
            halves=halves,
        )


@dataclass(frozen=True)
class ScaleConfig:
    """How the run is spread."""

    engine: Literal["serial", "local"] = "serial"
    """what runs the roles; serial: all in this process; local: each in a process of its own"""
    relax: Preset = "tianji"
    """how far acting and learning may run apart: a preset, see `tianji list`"""
    actors: Annotated[int, Bound(1, 1000)] = 1
    """actors, each with envs of its own; "auto": as many as `tianji plan` finds best, which then
    says engine and cores, too, and shares envs_per_actor out among them"""
    learners: Annotated[int, Bound(1, 64)] = 1
    """learners of a group; each takes an equal share of every batch"""
    groups: Annotated[int, Bound(1, 64)] = 1
    """groups of actors, buffer and learners; [join] says how they learn together"""
    envs_per_actor: Annotated[int, Bound(1, 1_000_000)] = 8
    """envs that an actor steps together"""
    rebalance: bool = False
    """the number of active actors follows what the run measures; scale.actors is then the most"""
    halves: bool = False
    """one half of an actor's envs simulates while actions are chosen for the other; Atari can"""
    env_threads: Count = 1
    """threads that an actor's env steps with; only Atari has its own"""
    rollout_length: Count = 32
    """steps of each env in a rollout"""
    cores: Count = 1
    """cores that the learner computes with (torch threads)"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where the learner computes"""
    pin: bool = True
    """engine local: tie the learner to its cores and the other roles to the rest"""


def _unset(kind: type[Any], but: tuple[str, ...], **bounded: Any) -> Any:
    """The fields of another dataclass, none of which has a value, some of them within bounds. What
    they mean stays there."""
    hints = typing.get_type_hints(kind) | bounded
    fields = [(name, hint | None, None) for name, hint in hints.items() if name not in but]
    return dataclasses.make_dataclass("Unset", fields, frozen=True, namespace={"like": kind})


_RELAX: Any = _unset(
    Relaxation,
    but=("paced", "window"),
    lead=Annotated[float, Bound(0, infinite=True)],
    publish=Count,
    max_staleness=Whole,
    credit=Whole,
    max_batch=Count,
    max_wait=NotNegative,
)


@dataclass(frozen=True)
class RelaxConfig(_RELAX):  # type: ignore[misc]
    """Fields of the relaxation, where they are not to be the preset's."""

    publish_when: str | None = None
    """a registered trigger: publish when it is due, instead of every so many updates"""
    send_when: str | None = None
    """a registered trigger: push a rollout when it is due, before it is full"""


@dataclass(frozen=True)
class ReuseConfig:
    """How often rollouts of an on-policy algorithm are consumed."""

    window: Count = 1
    """batches of which each update draws one, 1 / window of it new; 1: each rollout once"""


@dataclass(frozen=True)
class JoinConfig:
    """How the learners of several groups exchange their models."""

    graph: Literal["complete", "ring", "exponential"] | None = None
    """whose models a group takes in: all others' (join average), one neighbour's, or one at a
    distance that doubles from round to round (join gossip); else complete or ring"""
    every: Count | None = None
    """updates from one round to the next, at least; else 10 to average, 1 to gossip"""
    patience: Annotated[float, Bound(0, infinite=True)] | None = None
    """updates that a learner goes on without a round's models; 0: groups wait for each other; inf:
    never; else 0 at lead 0, 10 to gossip, and inf"""


@dataclass(frozen=True)
class StopConfig:
    """When the run ends: at the first of these."""

    return_: float | None = None
    """mean return of the last 100 episodes"""
    win_rate: Annotated[float, Bound(0, infinite=True)] | None = None
    """share of the last 100 episodes that were won, 0 to 1, where the env says so"""
    steps: Count | None = None
    """env steps received"""
    updates: Count | None = None
    """updates made"""
    seconds: Positive | None = None
    """wall-clock time of training, earlier parts of a resumed run included"""
    when: str | None = None
    """a registered trigger: the run ends when it is due"""


@dataclass(frozen=True)
class EvalConfig:
    """Greedy episodes beside training."""

    every: Whole = 0
    """updates between evaluations; 0: none"""
    episodes: Count = 10
    """episodes of an evaluation"""
    when: str | None = None
    """a registered trigger: evaluate when it is due, too"""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept on disk."""

    every: Whole = 0
    """updates between checkpoints; 0: by `seconds` alone"""
    seconds: Annotated[float, Bound(0, above=True, infinite=True)] = 120.0
    """seconds between checkpoints, at most; inf: none but by `every`; the end always makes one"""
    keep: Count = 3
    """how many of the last ones to keep, beside the best"""
    store: Literal["auto", "always", "never"] = "auto"
    """save what the buffer holds, so that resuming is exact; auto: up to 256 MiB"""
    when: str | None = None
    """a registered trigger: save when it is due, too"""


@dataclass(frozen=True)
class FaultsConfig:
    """What may go wrong before the run ends, and what is done about it."""

    restarts: Whole = 5
    """times that actors, or evaluators, may die or hang and be restarted within `window`"""
    recoveries: Whole = 3
    """times that the run may go on from its last checkpoint by itself within `window`"""
    env_restarts: Whole = 20
    """times that envs may raise and be built anew within `window`"""
    window: Positive = 600.0
    """seconds over which these are counted"""
    hang: Positive | None = None
    """seconds without a step after which an actor hangs; else 30, or 10 times its longest"""
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """when an update is NaN or infinite: end, leave it out, or go back to the last checkpoint"""
    grace: Positive = 20.0
    """seconds in which a run that is told to end must be saved"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run, resolved: every key has a value."""

    env: EnvConfig
    algorithm: Algorithm
    network: Network
    scale: ScaleConfig
    relax: RelaxConfig
    reuse: ReuseConfig
    join: JoinConfig = JoinConfig()
    stop: StopConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    faults: FaultsConfig = FaultsConfig()
    seed: Whole = 0
    """of everything random in the run"""
    name: str = "run"
    """of the config file, for the run folder's name"""
    origin: Mapping[str, str] = field(default_factory=dict, compare=False)
    """where each key's value came from"""
    auto: bool = False
    """scale.actors = "auto": the plan says how the run is spread; until then there is one actor,
    with all envs"""

    def tree(self) -> dict[str, Any]:
        """The config as TOML would hold it, every key present; keys without a value left out."""
        tree: dict[str, Any] = {"seed": self.seed}
        for section in SECTIONS:
            tree[section] = _values(getattr(self, section))
        tree["algorithm"] = {"name": self.algorithm.name, **tree["algorithm"]}
        return tree

    def identity(self) -> str:
        """A hash of all that decides what is learnt: a checkpoint belongs to one of these."""
        tree = {k: v for k, v in self.tree().items() if k in ("seed", *IDENTITY)}
        tree["scale"] = {k: v for k, v in tree["scale"].items() if k not in WHERE}
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()

    def scaled(self, **changes: Any) -> Config:
        """The config with some of its section "scale" changed."""
        return dataclasses.replace(self, scale=dataclasses.replace(self.scale, **changes))

    def relaxed(self, **changes: Any) -> Config:
        """The config with some of its section "relax" changed."""
        return dataclasses.replace(self, relax=dataclasses.replace(self.relax, **changes))

    def triggers(self) -> dict[str, str]:
        """Which registered triggers are named, and by which key."""
        return {
            f"{section}.{f.name}": value
            for section in ("relax", "stop", "eval", "checkpoint")
            for f in dataclasses.fields(getattr(self, section))
            if f.name.endswith("when") and (value := getattr(getattr(self, section), f.name))
        }

    def rows(self) -> list[tuple[str, Any, str, str]]:
        """(dotted key, value, where from, meaning) of every key, also of those without a value."""
        told = [("seed", self.seed, _meanings(Config)["seed"])]
        for section in SECTIONS:
            part = getattr(self, section)
            if section == "algorithm":
                told.append(("algorithm.name", part.name, "which algorithm"))
            meanings = _meanings(type(part))
            for name, f in _fields(part).items():
                told.append((f"{section}.{name}", getattr(part, f.name), meanings[f.name]))
        auto = {"scale.actors": "auto"} if self.auto else {}
        return [
            (key, auto.get(key, value), self.origin.get(key, "default"), meaning)
            for key, value, meaning in told
        ]


SECTIONS: dict[str, Any] = {
    name: kind
    for name, kind in typing.get_type_hints(Config).items()
    if dataclasses.is_dataclass(kind) or kind is Algorithm
}
"""whose keys are its fields; those of [algorithm] are those of the one that is named"""
IDENTITY = ("env", "algorithm", "network", "scale", "relax", "reuse", "join")
WHERE = ("engine", "pin", "env_threads", "rebalance")
"""keys of [scale] that say where roles run, not what is learnt"""


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: str | Sequence[str] = (),
    name: str | None = None,
    available: int | None = None,
) -> Config:
    """A config from a file, the name of a shipped one, or a mapping; overrides are "key=value".
    `available` are the cores that the run may use, by default those of this process."""
    tree, origin, own_name = _given(source)
    origins = dict.fromkeys(_leaf_keys(tree), origin)
    actors = _scale_of(tree).get("actors", 1)
    for key in _override(tree, overrides):
        origins[".".join(key.split(".")[:2])] = "command line"
    auto = _take_auto(tree)
    shares = auto and type(actors) is int and actors > 1
    if shares and origins.get("scale.envs_per_actor") != "command line":
        envs = tree["scale"].get("envs_per_actor", ScaleConfig.envs_per_actor)
        if type(envs) is int:  # those of all actors are shared out
            tree["scale"]["envs_per_actor"] = actors * envs
            origins["scale.envs_per_actor"] = f"{origin}, of {actors} actors"
    config = _resolve(tree, origins, name or own_name, cores() if available is None else available)
    return dataclasses.replace(config, auto=auto)


def _given(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str, str]:
    """What a source says, before overrides; where it came from, and its name."""
    if isinstance(source, Mapping):
        return dict(source), "given", "run"
    path = find_config(source)
    try:
        return tomllib.loads(path.read_text()), path.name, path.stem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"{path} is not TOML, so nothing of it can be used: {error}") from error


def _scale_of(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    scale = tree.get("scale")
    return scale if isinstance(scale, Mapping) else {}


def _take_auto(tree: dict[str, Any]) -> bool:
    """Is the number of actors left to the plan? Then there is one, until it is made."""
    if not isinstance(actors := _scale_of(tree).get("actors"), str):
        return False
    if actors != "auto":
        raise _wrong("scale.actors", actors, 'a whole number, or "auto": as many as a plan says')
    tree["scale"] = {**tree["scale"], "actors": 1}
    return True


def engine_of(source: str | Path | Mapping[str, Any], overrides: str | Sequence[str]) -> str:
    """What scale.engine will be, without a look at anything else; "auto" where that is left to the
    plan; "" where the config is wrong, which `load_config` then says."""
    try:
        tree, _, _ = _given(source)
        _override(tree, overrides)
        if _take_auto(tree):
            return "auto"
        engine = tree.get("scale", {}).get("engine", ScaleConfig.engine)
    except (Refusal, ValueError, OSError, AttributeError):
        return ""
    return engine if isinstance(engine, str) else ""


def find_config(source: str | Path) -> Path:
    """The file itself, that of a run folder, or a shipped config of that name."""
    path = Path(source)
    if path.is_dir() and (path / "config.toml").is_file():
        return path / "config.toml"
    if path.is_file():
        return path
    shipped = {p.stem: p for p in shipped_configs()}
    if str(source) in shipped:
        return shipped[str(source)]
    near = nearest(path.stem, shipped)
    raise Refusal(
        f"there is no config file {path}, so there is nothing to run.{near} `tianji list` names "
        f"the shipped ones; give a path or one of those names."
    )


def shipped_configs() -> list[Path]:
    here = Path(__file__).resolve().parent
    for folder in (here / "configs", here.parents[1] / "configs"):
        if folder.is_dir():
            return sorted(folder.glob("*.toml"))
    return []


def _resolve(
    tree: Mapping[str, Any], origins: Mapping[str, str], name: str, available: int
) -> Config:
    for key in tree:
        if key != "seed" and key not in SECTIONS:
            raise _unknown(key, tree[key], ["seed", *SECTIONS])
    for section in SECTIONS:
        if not isinstance(tree.get(section, {}), Mapping):
            raise Refusal(f"{section} = {tree[section]!r} must be a table: write [{section}].")
    env = _TOML.read(EnvConfig, tree.get("env", {}), "env")
    import_modules(env.imports)
    algorithm = dict(tree.get("algorithm", {}))
    if not isinstance(which := algorithm.pop("name", None), str):
        raise Refusal(
            'algorithm.name is not set, so there is nothing to train with. Add name = "ppo" '
            "under [algorithm]; `tianji list` names them all."
        )
    trees = {**tree, "algorithm": algorithm}
    kinds = {**SECTIONS, "algorithm": algorithm_class(which)}
    parts = {
        section: _TOML.read(kind, trees.get(section, {}), section)
        for section, kind in kinds.items()
        if section != "env"
    }
    seed = _TOML.read(Whole, tree.get("seed", 0), "seed")
    config = Config(env=env, seed=seed, name=name, origin=dict(origins), **parts)
    _check(config, available)
    return config


def _check(config: Config, available: int) -> None:
    """What no single key can know."""
    if config.scale.cores > available:
        raise Refusal(
            f"scale.cores = {config.scale.cores} exceeds the {available} cores that this process "
            f"may use; threads that share a core slow each other 3 to 18 times. Set scale.cores "
            f"to {available} or less."
        )
    scale = config.scale
    threads = scale.cores * scale.learners * scale.groups
    if scale.cores > 1 and threads > available:
        raise Refusal(
            f"scale.cores = {scale.cores} for each of {scale.learners * scale.groups} learners "
            f"makes {threads} threads, and this process may use {available} cores; threads that "
            f"share a core slow each other 3 to 18 times. Set scale.cores = 1, or scale.learners "
            f"or scale.groups lower."
        )
    _check_env_threads(scale, available)
    _check_wrappers(config)
    for key in ("learners", "groups"):
        count = getattr(config.scale, key)
        if config.scale.engine == "serial" and count > 1:
            raise Refusal(
                f'scale.{key} = {count} needs processes, and scale.engine = "serial" has one, in '
                f"which they would only take turns: it would be slower, not faster. Set "
                f'scale.engine = "local", or scale.{key} = 1.'
            )
    of_updates = {"join.patience": config.join.patience, "relax.lead": config.relax.lead}
    for key, updates in of_updates.items():
        if updates is not None and math.isfinite(updates) and not updates.is_integer():
            raise Refusal(f"{key} = {updates} is no number of updates. Set a whole number, or inf.")
    stop = config.stop
    if all(getattr(stop, f.name) is None for f in dataclasses.fields(stop)):
        raise Refusal(
            "[stop] is empty, so the run would never end. Set stop.steps, stop.return, "
            "stop.win_rate, stop.updates or stop.seconds."
        )
    if stop.win_rate is not None and 1 < stop.win_rate < math.inf:
        raise Refusal(
            f"stop.win_rate = {stop.win_rate:g} is more than all episodes, so the run would never "
            f"end by it. It is a share: set it to 1 or less."
        )
    for key, trigger in config.triggers().items():
        if trigger not in TRIGGERS:
            raise Refusal(
                f'{key} = "{trigger}" names no trigger, so it would never be due.'
                f"{nearest(trigger, TRIGGERS)} Own ones register themselves with "
                f"tianji.register_trigger in a module that env.imports names."
            )
    if config.relax.publish_when and config.relax.publish:
        raise Refusal(
            "relax.publish and relax.publish_when both say when a version is published, and only "
            "one can. Leave one of them out."
        )


def _check_env_threads(scale: ScaleConfig, available: int) -> None:
    if scale.env_threads == 1:
        return
    threads = scale.env_threads
    if scale.engine != "serial":
        threads = (scale.actors * threads + scale.learners * scale.cores) * scale.groups
    if threads > available:
        raise Refusal(
            f"scale.env_threads = {scale.env_threads} makes {threads} threads with those of all "
            f"actors and learners, and this process may use {available} cores; threads that share "
            f"a core slow each other. Set scale.env_threads = 1, or scale.actors lower."
        )


NORMALISERS = ("NormalizeObservation", "NormalizeReward")
"""wrappers of Gymnasium with a running mean of their own"""


def _check_wrappers(config: Config) -> None:
    """Of what is told twice, or differs from env to env, nothing good would come."""
    scale = config.scale
    envs = scale.actors * scale.groups * scale.envs_per_actor
    for wrapper in config.env.wrappers:
        name = wrapper if isinstance(wrapper, str) else wrapper.get("name")
        if not isinstance(name, str):
            raise Refusal(
                f"env.wrappers has {wrapper}, which names no wrapper. Write a name, or a table "
                f'such as {{ name = "TimeLimit", max_episode_steps = 200 }}.'
            )
        if name.rpartition(":")[2] in NORMALISERS and (envs > 1 or config.eval.every > 0):
            key = "observation" if "Observation" in name else "reward"
            raise Refusal(
                f'env.wrappers names "{name}", whose mean and variance are each env\'s own: the '
                f"policy would see differently scaled numbers from env to env, and others again in "
                f"evaluation. Set algorithm.normalise_{key} = true where the algorithm has it: "
                f"the learner keeps those, one for all."
            )


class _Toml(Codec):
    """Reads a config: keys may be left out, and what is wrong is refused with what is right."""

    null = False
    item = "{}[{}]"

    def wrong(self, kind: Any, value: Any, key: str) -> Refusal:
        origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
        if origin is Literal:
            near = nearest(value, parts) if isinstance(value, str) else ""
            return Refusal(
                f"{key} = {value!r} is not known.{near} It is one of {', '.join(parts)}."
            )
        numbers = origin is tuple and typing.get_origin(parts[0]) is Annotated
        wanted = {
            int: "a whole number",
            float: "a number",
            str: "a text in quotes",
            dict: "a table, such as { continuous = true }",
            tuple: "a list, such as " + ("[64, 64]" if numbers else '["a", "b"]'),
            types.UnionType: "a text in quotes, or a table with a name",
        }
        return _wrong(key, value, wanted.get(origin, "true or false"))

    def _fields(self, kind: Any, value: Any, key: str) -> Any:
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = _fields(kind)
        for name, part in value.items():
            if name not in fields:
                of = f"algorithm {kind.name}" if key == "algorithm" else "a config"
                raise _unknown(f"{key}.{name}", part, [f"{key}.{k}" for k in fields], of)
        values = {}
        for name, f in fields.items():
            if name in value:
                values[f.name] = self.read(hints[f.name], value[name], f"{key}.{name}")
            elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                told = f"{key}.{name} is not set ({_meanings(kind)[f.name]}), and it has no default"
                raise Refusal(f"{told}. Set it.")
        return kind(**values)

    def _number(self, kind: Any, value: Any, key: str, within: tuple[Any, ...]) -> Any:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not (whole or (kind is float and isinstance(value, float))):
            raise self.wrong(kind, value, key)
        found = value if isinstance(value, kind) else kind(value)
        if found != found:
            raise Refusal(f"{key} = nan is not a number, so nothing could be compared with it.")
        for bound in within:
            if isinstance(bound, Bound) and not bound.holds(found):
                raise Refusal(f"{key} = {found!r} is out of range. It must be {bound}.")
        return found


_TOML = _Toml()


def _unknown(key: str, value: object, valid: Sequence[str], of: str = "a config") -> Refusal:
    return Refusal(
        f"{key} = {value!r} is no key of {of}, so it would do nothing."
        f"{nearest(key, valid)} Valid here: {', '.join(k.split('.')[-1] for k in valid)}."
    )


def _wrong(key: str, value: object, wanted: str) -> Refusal:
    return Refusal(f"{key} = {value!r} is of the wrong type ({type(value).__name__}). "
                   f"It must be {wanted}.")  # fmt: skip


def _override(tree: dict[str, Any], overrides: str | Sequence[str]) -> list[str]:
    """Put "a.b=value" into the tree, for all of them; the value is TOML, or a text where that is
    not valid TOML. Returns the keys."""
    keys = []
    for override in [overrides] if isinstance(overrides, str) else overrides:
        key, equals, text = override.partition("=")
        keys.append(key := key.strip())
        if not equals or not key:
            raise Refusal(f'"{override}" is not an override. Write key=value, such as seed=3.')
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        *path, last = key.split(".")
        node = tree
        for part in path:
            inner = node.get(part, {})
            node[part] = dict(inner) if isinstance(inner, Mapping) else {}
            node = node[part]
        node[last] = value
    return keys


def _leaf_keys(tree: Mapping[str, Any]) -> list[str]:
    keys = []
    for key, value in tree.items():
        keys += [f"{key}.{k}" for k in value] if isinstance(value, Mapping) else [key]
    return keys


def _values(part: Any) -> dict[str, Any]:
    """A dataclass as TOML would hold it, keys without a value left out."""
    values = {name: getattr(part, f.name) for name, f in _fields(part).items()}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v is not None}


def _fields(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    """By their keys: `return_` is written `return`, a word that Python keeps for itself."""
    return {f.name.removesuffix("_"): f for f in dataclasses.fields(kind)}


def _meanings(kind: type[Any]) -> dict[str, str]:
    """The line under each field of a dataclass, also of one that it inherits."""
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__[1:]):
        if dataclasses.is_dataclass(base):
            meanings |= _meanings(base)
    source = inspect.getsource(vars(kind).get("like", kind))
    body = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(body, ast.ClassDef)
    for node, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            meanings[node.target.id] = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                meanings[node.target.id] = " ".join(str(following.value.value).split())
    return meanings
