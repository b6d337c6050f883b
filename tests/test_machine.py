"""What a process may still take, and what is known of other processes."""

import os
import subprocess
import sys
import time

import pytest

from tianji.machine import (
    _cgroup_cores,
    _cgroup_memory,
    core_order,
    gpu_model,
    process_cpu,
    process_rss,
    process_started,
)


def groups(tmp_path, line, files):
    mine = tmp_path / "cgroup"
    mine.write_text(line + "\n")
    root = tmp_path / "fs"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return _cgroup_memory(root, mine)


def test_the_tightest_control_group_around_a_process_decides(tmp_path):
    files = {
        "jobs/memory.max": 3000,
        "jobs/memory.current": 1000,
        "jobs/mine/memory.max": 9000,
        "jobs/mine/memory.current": 500,
        "memory.current": 5000,
    }
    assert groups(tmp_path, "0::/jobs/mine", files) == 2000


def test_a_control_group_without_a_limit_does_not_count(tmp_path):
    files = {"mine/memory.max": "max", "mine/memory.current": 500}
    assert groups(tmp_path, "0::/mine", files) is None


def test_the_older_kind_of_control_group_is_understood(tmp_path):
    files = {
        "memory/mine/memory.limit_in_bytes": 4000,
        "memory/mine/memory.usage_in_bytes": 1500,
    }
    assert groups(tmp_path, "4:memory:/mine", files) == 2500


def test_in_a_container_the_group_that_can_be_seen_is_the_outermost(tmp_path):
    files = {"memory.max": 700, "memory.current": 200}
    assert groups(tmp_path, "0::/not/to/be/seen", files) == 500


def test_a_process_tells_its_time_and_memory():
    me = os.getpid()
    before = process_cpu(me)
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert process_cpu(me) > before
    assert process_rss(me) > 2**20
    assert process_started(me) == process_started(me) > 0


def test_a_process_that_is_not_there_is_none():
    assert process_started(2**22 + 1) is None
    assert process_cpu(2**22 + 1) is None
    assert process_rss(2**22 + 1) == 0


def test_a_gpu_is_known_by_the_files_of_its_driver(tmp_path):
    assert gpu_model(tmp_path) is None
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("IRQ: 3\nModel: \t Big One\n")
    assert gpu_model(tmp_path) == "Big One"


@pytest.mark.parametrize(
    ("limit", "cores"), [("150000 100000", 1.5), ("max 100000", None), ("nonsense", None)]
)
def test_cores_are_those_of_the_control_group(tmp_path, limit, cores):
    (tmp_path / "cgroup").write_text("0::/mine\n")
    (tmp_path / "fs" / "mine").mkdir(parents=True)
    (tmp_path / "fs" / "mine" / "cpu.max").write_text(limit + "\n")
    assert _cgroup_cores(tmp_path / "fs", tmp_path / "cgroup") == cores


def test_the_second_threads_of_cores_are_used_last(tmp_path):
    twins = {0: "0,4", 1: "1,5", 2: "2,6", 4: "0,4", 5: "1,5", 6: "2,6"}
    for core, list_ in twins.items():
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{list_}\n")
    assert core_order([0, 1, 2, 4, 5, 6], tmp_path) == [0, 1, 2, 4, 5, 6]
    for core, list_ in {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}.items():
        (tmp_path / f"cpu{core}" / "topology").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(list_)
    assert core_order([0, 1, 2, 3], tmp_path) == [0, 2, 1, 3]
    assert core_order([3, 1, 2], tmp_path) == [1, 2, 3], "of a pair that is not whole, all count"
    assert core_order([9, 8], tmp_path) == [8, 9], "and where nothing is known"
    assert sorted(core_order()) == sorted(os.sched_getaffinity(0))


POOLS = """
import numpy
import threadpoolctl

threadpoolctl.threadpool_limits(3, "blas")  # as a program has it on three cores


def pools():
    found = threadpoolctl.threadpool_info()
    return {part["user_api"]: part["num_threads"] for part in found if part["user_api"] == "blas"}
"""


def printed(program, folder):
    command = [sys.executable, "-W", "ignore", "-c", POOLS + program]
    return subprocess.run(command, cwd=folder, check=True, text=True, capture_output=True).stdout


def test_numpy_has_one_thread_in_a_run_of_a_program_that_gave_it_several(tmp_path):
    assert printed("print(pools())", tmp_path) == "{'blas': 3}\n"
    program = "import tianji; tianji.train('ppo_cartpole', 'stop.updates=1'); print(pools())"
    assert printed(program, tmp_path).endswith("{'blas': 1}\n")


def test_numpy_has_one_thread_where_something_is_measured(tmp_path):
    program = "from tianji.probe import alone; print(alone(lambda: pools, [0]), pools())"
    assert printed(program, tmp_path) == "{'blas': 1} {'blas': 3}\n"
