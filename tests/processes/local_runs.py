"""Runs with processes, as tests make them: small configs, someone who watches, what is left."""

import contextlib
import copy
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import tomli_w

import tianji

CHAIN = {"id": "toy/Chain", "kwargs": {"anywhere": True, "limit": 20}}
PPO = {
    "env": CHAIN,
    "algorithm": {"name": "ppo", "epochs": 2, "minibatches": 2},
    "network": {"hidden": [8]},
    "scale": {"relax": "sync", "actors": 2, "envs_per_actor": 4, "rollout_length": 8},
    "stop": {"updates": 8},
}
NORMALISED = {
    **PPO,
    "env": {"id": "toy/Identity", "kwargs": {"continuous": True}},
    "algorithm": {
        "name": "ppo", "epochs": 2, "normalise_observation": True, "normalise_reward": True,
    },
}  # fmt: skip
DQN = {
    **PPO,
    "algorithm": {
        "name": "dqn", "warmup": 192, "capacity": 600, "batch_size": 32, "new_steps": 8,
        "n_step": 3,
    },
    "stop": {"updates": 60},
}  # fmt: skip
FAULT = {
    "env": {"id": "test/Fault", "imports": ["faults"], "kwargs": {}},
    "algorithm": {"name": "test_ppo", "epochs": 1, "minibatches": 1},
    "network": {"hidden": [8]},
    "scale": {
        "engine": "local", "relax": "sync", "actors": 2, "envs_per_actor": 2, "rollout_length": 8,
    },
    "stop": {"updates": 1_000_000},
}  # fmt: skip
LOCAL = "scale.engine=local"


def train(config, tmp_path, *overrides, **kwargs):
    return tianji.train(config, overrides, runs=tmp_path, **kwargs)


def fault(algorithm=None, stop=None, **kwargs):
    """A config whose env or algorithm goes wrong."""
    config = copy.deepcopy(FAULT)
    config["env"]["kwargs"] = kwargs
    config["algorithm"] |= algorithm or {}
    config["stop"] = stop or config["stop"]
    return config


def metrics(result):
    lines = Path(result.run_dir, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def learnt(result):
    """All of a result that must not depend on where its roles ran."""
    return {
        name: getattr(result, name)
        for name in (
            "params_sha256", "updates", "steps", "episodes", "return_mean", "replay_ratio",
            "staleness", "filtered", "stop_reason",
        )
    }  # fmt: skip


def hosts_of(folder, seconds=60.0):
    """The pid of every role of a run, once it has them and has written its first row."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            table = json.loads((folder / "hosts.json").read_text())
            if (folder / "metrics.jsonl").read_text().endswith("\n"):
                return {host["role"]: host["pid"] for host in table["hosts"]}
        time.sleep(0.02)
    raise TimeoutError(f"no hosts within {seconds} s")


def updates_of(folder):
    """By the last row of metrics."""
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["updates"]


def until(holds, seconds=60.0):
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.contextmanager
def beside(act):
    """Call `act` in a thread, while the main thread trains; what it raises is raised at the end."""
    found = []

    def run():
        try:
            act()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive()
    if found:
        raise found[0]


@contextlib.contextmanager
def launched(config, tmp_path, *overrides):
    """A `tianji train` in a process group of its own, and its hosts, once it has made updates."""
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(config))
    paths = [str(Path(__file__).parent), *sys.path]
    process = subprocess.Popen(
        [sys.executable, "-m", "tianji", "train", str(path), *overrides, "--runs", str(tmp_path),
         "--name", "run", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    try:
        yield process, hosts_of(tmp_path / "run")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def marked(mark):
    """Processes that were started with `mark` in their environment, wherever they are now."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_bytes()[:80]
    return found


def belongings():
    """What this process has that a run could leave behind in it."""
    descriptors = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            descriptors.append(f"{path.name} {os.readlink(path)}")
    return {
        "descriptors": sorted(x for x in descriptors if "/proc/" not in x),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "handlers": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
    }
