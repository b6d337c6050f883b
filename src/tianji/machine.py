"""What this process and this machine are: for manifests, `doctor`, and the time since launch."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.metadata
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

PACKAGES = ("tianji", "torch", "numpy", "gymnasium", "safetensors", "tensorboard", "rich")


def keep_memory() -> None:
    """Let freed memory stay with this process, so that the next tensor of its size needs no fresh
    pages: they take a quarter of the time of an update on pictures."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # another C library, with another allocator
        return
    map_above, trim_above, top_pad = -3, -1, -2  # of malloc.h
    libc.mallopt(map_above, 1 << 28)
    libc.mallopt(trim_above, 1 << 30)
    libc.mallopt(top_pad, 1 << 26)


def set_threads(count: int) -> None:
    """So many for torch. numpy's own pool computes small products only, and would spin beside
    others on shared cores: it has one, where a library was loaded before that could be said."""
    import torch

    threadpool_limits(1, "blas")  # type: ignore[no-untyped-call]
    torch.set_num_threads(count)  # last, as a torch that shares numpy's library needs them


def process_age() -> float:
    """Seconds since this process was started, the interpreter's own start included."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):  # not Linux: the interpreter's start is left out
        return time.process_time()


def process_started(pid: int) -> int | None:
    """When a process began, in the kernel's ticks, which tells a pid that was used again; None
    where there is no such process."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def process_cpu(pid: int) -> float | None:
    """Seconds of CPU time so far; None where there is no such process."""
    fields = _stat(pid)
    if fields is None:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Of this process so far, and of all that descend from it."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        time.process_time()
        + ended.ru_utime
        + ended.ru_stime
        + math.fsum(process_cpu(pid) or 0.0 for pid in _descendants(os.getpid()))
    )


def _descendants(pid: int) -> list[int]:
    """Of a process, while they live; none where the kernel does not tell."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            children = [int(child) for child in (task / "children").read_text().split()]
            found += [*children, *(one for child in children for one in _descendants(child))]
    return found


def process_rss(pid: int) -> int:
    """Bytes of memory that are resident; 0 where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def kept_waiting() -> float:
    """Seconds so far that this thread could have run and others ran instead; 0 where that is not
    told."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cores() -> int:
    """Cores that this process may use: by its affinity, and by its control group's share."""
    mine = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        mine = len(os.sched_getaffinity(0))
    quota = _cgroup_cores()
    return mine if quota is None else max(1, min(mine, int(quota)))


def core_order(
    mine: Iterable[int] | None = None, root: Path = Path("/sys/devices/system/cpu")
) -> list[int]:
    """The cores that this process may run on, in the order to use them: a core that computes two
    threads at once counts as two, and its second one comes after the first ones of all others."""
    order: list[tuple[int, int]] = []
    used: Counter[str] = Counter()
    for core in sorted(os.sched_getaffinity(0) if mine is None else mine):
        try:
            twins = (root / f"cpu{core}" / "topology" / "thread_siblings_list").read_text().strip()
        except OSError:
            twins = str(core)
        order.append((used[twins], core))
        used[twins] += 1
    return [core for _, core in sorted(order)]


def _cgroup_cores(
    root: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")
) -> float | None:
    """The least that this process's control group and those around it may use; None: no limit."""
    shares = []
    for folder, first in _cgroups(root, mine, "cpu"):
        try:
            if first:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                most, period = ((folder / name).read_text().strip() for name in names)
            else:
                most, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if most.isdigit() and int(period) > 0:
            shares.append(int(most) / int(period))
    return min(shares, default=None)


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def gpu_model(root: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """Of the first GPU; None where there is none. The driver is asked by its files: a process that
    has asked CUDA cannot fork others that use it."""
    for path in sorted(root.glob("*/information")):
        for line in path.read_text().splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return None


def free_memory() -> int | None:
    """Bytes that this process may still take: of the machine, and of its control group."""
    free = [f for f in (_machine_memory(), _cgroup_memory()) if f is not None]
    return min(free) if free else None


def _machine_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(li.split()[1]) * 1024 for li in lines if li.startswith("MemAvailable")), None)


def _cgroup_memory(
    root: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")
) -> int | None:
    """The least that is left in this process's control group and in those around it."""
    left = []
    for folder, first in _cgroups(root, mine):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if not first:
            names = ("memory.max", "memory.current")
        try:
            most, used = ((folder / name).read_text().strip() for name in names)
        except OSError:
            continue  # in a container the outer groups are not there to see
        if most.isdigit():
            left.append(int(most) - int(used))
    return min(left, default=None)


def oom_kills(root: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> int:
    """Processes that were killed for lack of memory so far, in this process's control group and in
    those around it; 0 where that is not told."""
    kills = 0
    for folder, first in _cgroups(root, mine):
        try:
            lines = (folder / ("memory.oom_control" if first else "memory.events")).read_text()
        except OSError:
            continue
        counts = dict(line.split()[:2] for line in lines.splitlines() if len(line.split()) == 2)
        kills = max(kills, int(counts.get("oom_kill", 0)))
    return kills


def _cgroups(root: Path, mine: Path, what: str = "memory") -> list[tuple[Path, bool]]:
    """This process's control group for something and those around it, innermost first, in each
    hierarchy; True: of the first version."""
    try:
        lines = mine.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers != "" and what not in controllers.split(","):
            continue
        top = root if controllers == "" else root / what
        inside = top / path.strip("/")
        for folder in [inside, *inside.parents]:
            if top not in (folder, *folder.parents):
                break
            found.append((folder, controllers != ""))
    return found


def commit() -> str | None:
    """The commit of the folder we stand in, "+" where files differ from it; None outside of git."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, timeout=5, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if dirty else "")


def manifest(seed: int, identity: str) -> dict[str, Any]:
    """What one needs to know to repeat a run."""
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "seed": seed,
        "config_sha256": identity,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {package: version(package) for package in PACKAGES},
        "machine": {"system": platform.platform(), "cpu": cpu_model(), "cores": cores()},
    }
