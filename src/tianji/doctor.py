"""What works on this machine, and what to install or set where it does not."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

from tianji.machine import cores, cpu_model, free_memory, version

Finding = dict[str, Any]


def examine() -> list[Finding]:
    findings = [_python(), *_packages(), _torch(), _threads(), _shared_memory(), _runs_folder()]
    return findings + _extras()


def told(findings: list[Finding]) -> str:
    lines = []
    for f in findings:
        mark = "ok  " if f["works"] else ("FAIL" if f["needed"] else "-   ")
        lines.append(f"{mark} {f['what']:<16} {f['detail']}")
        if f["remedy"]:
            lines.append(f"{'':<21} {f['remedy']}")
    bad = sum(1 for f in findings if f["needed"] and not f["works"])
    lines.append("everything needed works" if bad == 0 else f"{bad} of what is needed fails")
    return "\n".join(lines)


def _finding(what: str, works: bool, detail: str, remedy: str = "", needed: bool = True) -> Finding:
    return {"what": what, "works": works, "needed": needed, "detail": detail, "remedy": remedy}


def _python() -> Finding:
    works = sys.version_info >= (3, 11)
    return _finding("python", works, sys.version.split()[0], "" if works else "install 3.11+")


def _packages() -> list[Finding]:
    findings = []
    for package in ("numpy", "gymnasium", "safetensors", "tensorboard", "rich", "tomli_w"):
        found = version(package)
        remedy = "" if found else f"pip install {package}"
        findings.append(_finding(package, found is not None, found or "missing", remedy))
    return findings


def _torch() -> Finding:
    if version("torch") is None:
        return _finding("torch", False, "missing", "pip install torch")
    import torch

    product = float(torch.ones(8, 8).mm(torch.ones(8, 8)).sum())
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return _finding("torch", product == 512.0, f"{torch.__version__}, {gpu}")


def _threads() -> Finding:
    set_to = os.environ.get("OMP_NUM_THREADS")
    said = f"OMP_NUM_THREADS={set_to}" if set_to else "OMP_NUM_THREADS not set"
    detail = f"{cores()} cores ({cpu_model()}), {said}; a run sets torch's threads to scale.cores"
    return _finding("threads", True, detail)


def _shared_memory() -> Finding:
    """Anonymous shared memory, as several processes on this machine would use it."""
    size = 1 << 20
    try:
        descriptor = os.memfd_create("tianji-doctor")
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        remedy = 'only engine = "serial" works here; processes need Linux'
        return _finding("shared memory", False, f"not available: {error}", remedy, needed=False)
    return _finding("shared memory", True, f"memfd works; {_memory()}", needed=False)


def _memory() -> str:
    free = free_memory()
    return "free memory unknown" if free is None else f"{free / 2**30:.1f} GiB free"


def _runs_folder() -> Finding:
    works = os.access(".", os.W_OK)
    remedy = "" if works else "choose another place with --runs"
    return _finding("current folder", works, "writable" if works else "not writable", remedy)


def _extras() -> list[Finding]:
    findings = []
    for extra, modules, use in (
        ("atari", ("ale_py",), "ALE/Pong-v5 and the other Atari games"),
        ("box2d", ("Box2D",), "LunarLander, BipedalWalker, CarRacing"),
        ("minatar", ("minatar",), "MinAtar/Breakout-v1 and its like"),
        ("mpe", ("mpe2", "pettingzoo"), "pettingzoo/...; mpe/... needs nothing"),
        ("mujoco", ("mujoco",), "HalfCheetah, Hopper, Humanoid"),
        ("smax", ("jaxmarl",), "smax/..."),
        ("video", ("pygame", "imageio", "imageio_ffmpeg"), "tianji play"),
    ):
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        detail = f"for {use}" + (f"; missing: {', '.join(missing)}" if missing else "")
        remedy = f"pip install 'tianji[{extra}]'" if missing else ""
        findings.append(_finding(f"extra {extra}", not missing, detail, remedy, needed=False))
    return findings
