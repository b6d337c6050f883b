"""The kill matrix: what is done to which process in which phase of a run, what is promised of it,
and a run that has it done and looks whether the promise was kept."""

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tomli_w
from local_runs import marked

from tianji.checkpoint import Checkpoints
from tianji.config import SECTIONS
from tianji.errors import Refusal
from tianji.testing.faults import happened

DEEDS = ("SIGKILL", "SIGSTOP", "SIGTERM")
ROLES = ("actor", "buffer", "learner", "evaluator", "launcher")
PHASES = ("start-up", "warm-up", "training", "checkpointing", "shutdown")
FAULTS = ("raises", "hangs", "segfaults", "nans", "slows")
"""what the env of an actor does, in training"""

STOPPED = 3.0
"""seconds between SIGSTOP and SIGCONT"""
GONE = 5.0
"""seconds in which nothing may be left of a run that has ended"""
LIMIT = 60.0
"""seconds for each thing that is waited for"""
HANG = 2.0
"""seconds after which an actor is taken to hang, where its env does"""
MORE = 20
"""updates that a run makes after what was done to it"""


@dataclass(frozen=True)
class Case:
    deed: str
    role: str
    phase: str

    def __str__(self) -> str:
        return f"{self.deed} {self.role} {self.phase}"

    @property
    def host(self) -> str:
        return "actor-1" if self.role == "actor" else self.role


MATRIX = [Case(d, r, p) for d in DEEDS for r in ROLES for p in PHASES]
INJECTED = [Case(fault, "actor", "training") for fault in FAULTS]


@dataclass(frozen=True)
class Promise:
    """What holds after a case. Of every case: it ends in bounded time, no process is left after
    5 s, nothing is left in /dev/shm, what is in metrics.jsonl parses, and steps and updates in it
    never run backwards."""

    code: int
    """that `tianji train` ends with; -9: killed"""
    says: str
    life: str = ""
    """"same": the process lives on; "new": another one takes its place; "": either"""
    fault: dict[str, str] = field(default_factory=dict)
    """what a line of faults.jsonl about this role says; "": anything but nothing"""
    faultless: bool = False
    """faults.jsonl has no line"""
    saved: bool = True
    """there is a checkpoint that loads, with the result's updates, all finite"""
    resumes: bool = False
    """`tianji resume` goes on from it"""


def promise(deed: str, role: str, phase: str) -> Promise:
    """The one table of what is promised."""
    if role == "launcher":
        return _promise_of_launcher(deed, phase)
    if phase == "shutdown":
        return Promise(0, "the run had ended: exit 0")
    if deed == "SIGTERM":
        return Promise(0, "hosts leave it to the launcher: nothing", "same", faultless=True)
    if deed == "SIGSTOP":
        return Promise(0, "goes on when it is continued")
    if deed == "SIGKILL":
        killed = {"signal": "SIGKILL"}
        if role in ("actor", "evaluator"):
            return Promise(0, "restarted, the run goes on", "new", killed)
        return Promise(0, "restarted from what was learnt, the run goes on", "new", killed)
    return {
        "raises": Promise(0, "env rebuilt, episodes aborted", "same", {"exception": "injected"}),
        "hangs": Promise(0, "stack saved, restarted", "new", {"cause": ""}),
        "segfaults": Promise(0, "restarted", "new", {"signal": "SIGSEGV"}),
        "nans": Promise(0, "not trained on, env rebuilt", "same", {"cause": "nan"}),
        "slows": Promise(0, "nothing: the others wait where they must", "same", faultless=True),
    }[deed]


def _promise_of_launcher(deed: str, phase: str) -> Promise:
    if deed == "SIGSTOP":
        return Promise(0, "goes on when it is continued", faultless=True)
    if deed == "SIGKILL":
        saved = phase in ("training", "checkpointing", "shutdown")
        says = "every process gone in 5 s; resume goes on from the last checkpoint"
        return Promise(-9, says, saved=saved, resumes=saved)
    if phase == "shutdown":
        return Promise(0, "the run had ended: exit 0")
    return Promise(75, "checkpoint, exit 75; resume goes on", faultless=True, resumes=True)


@dataclass
class Seen:
    """What a case came to."""

    case: Case
    promise: Promise
    code: int | None = None
    recovered: float | None = None
    """seconds from the deed (of SIGSTOP, from its end) to the first update of a run that is whole
    again; where the run ends by it, to the end of its last process"""
    broken: list[str] = field(default_factory=list)
    """promises that were not kept"""

    def row(self) -> dict[str, object]:
        case = self.case
        return {
            "deed": case.deed, "role": case.role, "phase": case.phase,
            "promise": self.promise.says, "promised_code": self.promise.code, "code": self.code,
            "seen": "; ".join(self.broken) or "kept",
            "recovered_s": None if self.recovered is None else round(self.recovered, 3),
            "ok": not self.broken,
        }  # fmt: skip


class Broken(Exception):
    """A promise that was not kept, after which there is nothing more to be seen."""


def happen(case: Case, place: Path) -> Seen:
    """Start a run in an empty folder, do it, and see."""
    seen = Seen(case, promise(case.deed, case.role, case.phase))
    shared = _shared()
    with _Run(case, place) as run:
        try:
            run.reach()
            run.do()
            if seen.promise.code == 0 and case.phase != "shutdown":
                seen.recovered = run.recover(seen.promise)
                run.tell_target(run.updates() + MORE)
            run.wait(lambda: run.process.poll() is not None, "end")
        except Broken as error:
            seen.broken.append(str(error))
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may be about to say why
                run.process.wait(GONE)
        seen.code = run.process.poll()
        if seen.code is not None:
            _judge(seen, run)
    if grown := _abandoned(_shared() - shared):
        seen.broken.append(f"left in /dev/shm: {sorted(grown)}")
    return seen


def _judge(seen: Seen, run: "_Run") -> None:
    """What a run that has ended left, against what is promised; a run that ended as it must not is
    not asked for what follows from that."""
    seen.broken += run.left()
    if seen.recovered is None and not seen.broken:
        seen.recovered = time.time() - max(run.done_at, run.continued_at)
    if seen.code != seen.promise.code:
        seen.broken.append(f"ended with {seen.code}: {run.last_words()}")
    seen.broken += run.judge(seen.promise, seen.code == seen.promise.code)
    if seen.promise.resumes and not seen.broken:
        seen.broken += run.resume()


def config(case: Case, place: Path) -> dict[str, object]:
    """Two actors, an evaluator, checkpoints; steps that take a while but no processor."""
    tree = copy.deepcopy(DQN if case.phase == "warm-up" else PPO)
    kwargs = tree["env"]["kwargs"]
    if case.deed in FAULTS:
        kwargs |= {"only": case.host, "marker": str(place / "faults")}
        if case.deed == "slows":
            kwargs["slow"] = 0.02
        else:
            kwargs |= {"slows": 0.0, "at": {case.deed: 2000}}
        if case.deed == "hangs" and "faults" in SECTIONS:
            tree["faults"] = {"hang": HANG}
    return tree


PPO = {
    "env": {
        "id": "testing/Fault", "imports": ["tianji.testing.faults", "lingering"],
        "kwargs": {"slows": 1.0, "slow": 0.002},
    },
    "algorithm": {"name": "ppo", "epochs": 1, "minibatches": 1},
    "network": {"hidden": [8]},
    "scale": {"engine": "local", "actors": 2, "envs_per_actor": 2, "rollout_length": 8},
    "stop": {"updates": 1_000_000, "when": "chaos"},
    "eval": {"every": 10, "episodes": 2},
    "checkpoint": {"every": 20},
}  # fmt: skip
DQN = {
    **PPO,
    "algorithm": {
        "name": "dqn", "warmup": 2400, "capacity": 10_000, "batch_size": 32, "new_steps": 32,
    },
    "env": PPO["env"] | {"kwargs": {"slows": 1.0, "slow": 0.004}},
}  # fmt: skip


class _Run:
    """A `tianji train` in a session of its own."""

    def __init__(self, case: Case, place: Path) -> None:
        self._case, self._place, self._folder = case, place, place / "runs" / "run"
        (place / "signs").mkdir()
        (place / "config.toml").write_text(tomli_w.dumps(config(case, place)))
        self._mark = f"tianji-chaos-{uuid.uuid4()}"
        self._pids: set[int] = set()
        self.done_at = self.continued_at = 0.0
        self._victim = -1
        self._line: dict[str, object] | None = None

    def __enter__(self) -> "_Run":
        runs = str(self._folder.parent)
        self.process = self._start(
            "train", str(self._place / "config.toml"), "--runs", runs, "--name", "run"
        )
        return self

    def __exit__(self, *error: object) -> None:
        """Whatever is left is ours, and is ended."""
        for pid in {self.process.pid, *self._alive()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _start(self, *words: str) -> subprocess.Popen:
        paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        about = {
            "TIANJI_TEST": self._mark, "TIANJI_CHAOS": str(self._place / "signs"),
            "TIANJI_CHAOS_PHASE": self._case.phase, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (self._place / "out").open("w") as out, (self._place / "err").open("w") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "tianji", *words, "--json"], stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, start_new_session=True, env=os.environ | about,
            )  # fmt: skip

    def wait(self, holds: Callable[[], object], what: str, seconds: float = LIMIT) -> None:
        """Until it holds. A run that ends before is a broken promise, too."""
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise Broken(f"did not {what} within {seconds:g} s")
            if self.process.poll() is not None and not holds():
                raise Broken(f"ended before it could {what}")
            time.sleep(0.01)

    def reach(self) -> None:
        """The phase, by what the run itself shows of it."""
        case, sign = self._case, self._place / "signs"
        if case.phase == "start-up":
            who = "actor-0" if case.role == "launcher" else case.host
            self.wait((sign / f"start-up-{who}").exists, "start")
        elif case.phase == "warm-up":
            self.wait(lambda: any(r["step"] > 0 for r in self.rows()), "warm up")
            if self.updates():
                raise RuntimeError("the warm-up was over before it was seen: make it longer")
        else:
            self.wait((self._folder / "checkpoints" / "latest").exists, "save")
        if case.phase == "shutdown":
            self.tell_target(self.updates() + MORE)
        if case.phase in ("checkpointing", "shutdown"):
            who = {"launcher": "launcher", "evaluator": "learner"}.get(case.role, case.host)
            if case.phase == "shutdown":
                who = "learner" if case.role == "launcher" else case.host
            self.wait((sign / f"{case.phase}-{who}").exists, f"reach {case.phase}")
        self._pids |= set(self.hosts().values())

    def do(self) -> None:
        case = self._case
        if case.deed in FAULTS:
            self._victim = self.hosts()["actor-1"]
            self.done_at = time.time()
            if case.deed != "slows":
                self.wait(lambda: happened(self._place / "faults"), "come to its fault")
                self.done_at = happened(self._place / "faults")[0].time
            return
        launcher = case.role == "launcher"
        self._victim = self.process.pid if launcher else self.hosts()[case.host]
        self.done_at = time.time()
        os.kill(self._victim, signal.Signals[case.deed])
        if case.deed == "SIGSTOP":
            time.sleep(STOPPED)
            with contextlib.suppress(ProcessLookupError):  # it may be ended while it is stopped
                os.kill(self._victim, signal.SIGCONT)
            self.continued_at = time.time()

    def recover(self, promised: Promise) -> float:
        """Wait for updates of a run that has all its processes; the seconds that it took."""
        host = self._case.host
        if promised.life == "new":
            self.wait(
                lambda: self.hosts().get(host, self._victim) != self._victim, f"restart {host}"
            )
        made = len(self.progress())
        self.wait(lambda: len(self.progress()) > made + 2, "make updates again")
        self._pids |= set(self.hosts().values())
        if promised.life == "same" and self.hosts().get(host) != self._victim:
            raise Broken(f"{host} is not the process that it was")
        return self.progress()[made][2] - max(self.done_at, self.continued_at)

    def left(self) -> list[str]:
        """Processes that outlive the run by more than they may."""
        end = time.monotonic() + GONE
        while (alive := self._alive()) and time.monotonic() < end:
            time.sleep(0.02)
        return [f"left after {GONE:g} s: {alive}"] if alive else []

    def judge(self, promised: Promise, as_promised: bool) -> list[str]:
        """What was written, against what is promised of it."""
        broken, checks = [], [self._check_rows]
        if as_promised:
            checks += [self._check_saved, self._check_faults, self._check_result]
        for check in checks:
            try:
                check(promised)
            except Broken as error:
                broken.append(str(error))
            except (OSError, ValueError, KeyError, Refusal) as error:
                broken.append(f"{check.__name__[7:]}: {type(error).__name__}: {error}")
        return broken

    def resume(self) -> list[str]:
        """Go on from the checkpoint to a new target."""
        version = self._saved()[0]
        self.tell_target(version + MORE)
        self.process = self._start("resume", str(self._folder))
        try:
            self.wait(lambda: self.process.poll() is not None, "end after resume")
        except Broken as error:
            return [str(error)]
        if self.process.returncode != 0:
            return [f"resume ended with {self.process.returncode}: {self.last_words()}"]
        result = json.loads((self._folder / "result.json").read_text())
        if result["updates"] < version + MORE or not result["resumed"]:
            return [f"resume went from {version} to {result['updates']}"]
        return self.left()

    def tell_target(self, updates: int) -> None:
        new = self._place / "signs" / ".target"
        new.write_text(str(updates))
        new.replace(new.with_name("target"))

    def hosts(self) -> dict[str, int]:
        """The pid of every role, by the log that it writes; hosts.json is up to a second older."""
        logs, found = str(self._folder.resolve() / "logs"), {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                path = Path(os.readlink(f"/proc/{pid}/fd/1"))
                if str(path.parent) == logs and not _zombie(pid):
                    found[path.stem] = pid
        with contextlib.suppress(OSError, ValueError):
            table = json.loads((self._folder / "hosts.json").read_text())
            self._pids |= {host["pid"] for host in table["hosts"] if host["pid"] > 0}
        return found

    def rows(self) -> list[dict[str, float]]:
        """Of metrics.jsonl."""
        try:
            lines = (self._folder / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def progress(self) -> list[tuple[int, int, float]]:
        """Updates, steps and time of every update that was made, in their order."""
        from lingering import RECORD

        try:
            data = (self._place / "signs" / "progress").read_bytes()
        except FileNotFoundError:
            return []
        return list(RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size]))

    def updates(self) -> int:
        return max((record[0] for record in self.progress()), default=0)

    def last_words(self) -> str:
        lines = (self._place / "err").read_text(errors="replace").strip().splitlines()
        said = [line for line in lines if line.startswith(("failed: ", "refused: "))] or lines[-1:]
        return (said or ["it said nothing"])[0][:200]

    def _alive(self) -> dict[int, str]:
        """Processes of the run: by its mark, by its files, by what hosts.json said."""
        found = {pid: words.decode(errors="replace") for pid, words in marked(self._mark).items()}
        name = str(self._folder)
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if pid == os.getpid():
                continue
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                if name in words or any(file.startswith(name) for file in _files(pid)):
                    found[pid] = words[:80]
        return {pid: words for pid, words in found.items() if not _zombie(pid)}

    def _check_rows(self, promised: Promise) -> None:
        rows = self.rows()
        for kind in (True, False):  # an evaluation's row is of the version that it played with
            own = [r for r in rows if ("eval/mean_reward" in r) is kind]
            for key in ("step", "updates"):
                values = [row[key] for row in own]
                if values != sorted(values):
                    raise Broken(f"{key} runs backwards in metrics.jsonl: {values}")

    def _check_saved(self, promised: Promise) -> None:
        if promised.saved:
            version, policy = self._saved()
            for name, array in policy.items():
                if isinstance(array, np.ndarray) and not np.isfinite(array).all():
                    raise Broken(f"{name} in the checkpoint is not finite")
            if promised.code != -9:
                updates = json.loads((self._folder / "result.json").read_text())["updates"]
                if version != updates:
                    raise Broken(f"the last checkpoint is of update {version}, not {updates}")

    def _saved(self) -> tuple[int, dict[str, object]]:
        """The newest checkpoint's version and policy; every file's hash is looked at."""
        folder = self._folder / "checkpoints"
        (newest,) = Checkpoints(folder, 1, "").list()[-1:]
        manifest = json.loads((newest / "MANIFEST.json").read_text())
        checkpoints = Checkpoints(folder, 1, manifest["identity"])
        checkpoints.verify(newest)
        loaded = checkpoints.load()
        return loaded.meta["updates"], _flat(loaded.parts["policy"])

    def _check_faults(self, promised: Promise) -> None:
        path = self._folder / "faults.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        told = [json.loads(line) for line in lines]
        if promised.faultless and told:
            raise Broken(f"faults.jsonl tells of {[line['cause'] for line in told]}")
        if promised.fault:
            mine = [line for line in told if line["role"] == self._case.host]
            for key, word in promised.fault.items():
                if not any(word in str(line[key] or "") and line[key] for line in mine):
                    raise Broken(f"faults.jsonl does not tell of {self._case.host}: {mine}")
        if self._case.deed == "hangs":
            logs = (self._folder / "logs").iterdir()
            if not any("testing/faults.py" in log.read_text(errors="replace") for log in logs):
                raise Broken("no stack of the env that hangs is in the logs")

    def _check_result(self, promised: Promise) -> None:
        if promised.code == -9:
            return
        status = json.loads((self._folder / "result.json").read_text())["status"]
        if status != {0: "done", 75: "stopped"}[promised.code]:
            raise Broken(f"result.json says {status}")
        if (self._folder / "hosts.json").exists():
            raise Broken("hosts.json is left")


def _flat(tree: object, name: str = "policy") -> dict[str, object]:
    if isinstance(tree, dict):
        return {k: v for key in tree for k, v in _flat(tree[key], f"{name}.{key}").items()}
    return {name: tree}


def _zombie(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def _files(pid: int) -> set[str]:
    """What a process has open."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def _shared() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _abandoned(names: set[str]) -> set[str]:
    """Those in /dev/shm that no process has open: others at work here have files of their own."""
    held = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            files = _files(int(pid))
            held |= {n for n in names if f"/dev/shm/{n}" in maps or f"/dev/shm/{n}" in files}
    return names - held
