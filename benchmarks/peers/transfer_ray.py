"""Ray: actor methods return the array, the driver gets it from the object store into storage.

A window of calls is open for each actor, so that no actor waits for the driver. Results below
100 KB come with the reply itself, which is faster than the store. CPU time is that of the actors
and the driver: Ray's own processes (raylet, gcs) are not counted.
"""

import os
import time

import numpy as np
import ray
from transfer_common import Cell, cell_of_argv, message_of, result, storage_of


@ray.remote(num_cpus=0)
class Actor:
    """Sends one message per call."""

    def __init__(self, cell: dict) -> None:
        self._cell = Cell(**cell)
        self._message = message_of(self._cell)

    def sample(self) -> np.ndarray:
        if self._cell.sample:
            time.sleep(self._cell.sample)
        return self._message

    def cpu(self) -> float:
        return time.process_time()


def main() -> None:
    cell = cell_of_argv()
    here = os.path.dirname(os.path.abspath(__file__))
    room = max(512 << 20, 32 * cell.actors * cell.size)
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=room,
        logging_level="ERROR", runtime_env={"env_vars": {"PYTHONPATH": here}},
    )  # fmt: skip
    try:
        taken = measure(cell)
    finally:
        ray.shutdown()
    result(*taken)  # last, as the driver prints Ray's warnings while it runs


def measure(cell: Cell) -> tuple[int, float, float, float]:
    actors = [Actor.remote(cell.__dict__) for _ in range(cell.actors)]
    places = storage_of(cell)

    def collect(total: int, seconds: float) -> int:
        deadline, asked, got = time.perf_counter() + seconds, 0, 0
        waiting = {}
        for _ in range(min(cell.slots, 8)):
            for actor in actors:
                if asked < total:
                    waiting[actor.sample.remote()] = actor
                    asked += 1
        while waiting:
            # One actor answers in order; of several, the first that is ready is taken.
            ref = next(iter(waiting))
            if len(actors) > 1:
                ref = ray.wait(list(waiting), num_returns=1)[0][0]
            np.copyto(places[got % len(places)], ray.get(ref))
            got += 1
            actor = waiting.pop(ref)
            if asked < total and time.perf_counter() < deadline:
                waiting[actor.sample.remote()] = actor
                asked += 1
        return got

    collect(8 * cell.actors, 60.0)
    before = sum(ray.get([actor.cpu.remote() for actor in actors]))
    cpu, begun = time.process_time(), time.perf_counter()
    got = collect(cell.total, cell.seconds)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    after = sum(ray.get([actor.cpu.remote() for actor in actors]))
    return got, seconds, cpu, after - before


if __name__ == "__main__":
    main()
