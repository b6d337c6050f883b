import numpy as np
import pytest
import torch

from tianji.algorithm import Network, Spec
from tianji.algorithms.dqn import DQN
from tianji.env import Discrete, EnvSpec
from tianji.recorded import EAGER, Recorded
from tianji.types import EPISODE, Rollout, leaf

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_on_a_cpu_it_is_the_function_of_the_arrays_themselves():
    seen = []
    double = Recorded(lambda x: (seen.append(x["a"]) or x["a"] * 2,), "cpu", records=True)
    a = np.arange(3.0)
    for _ in range(EAGER + 2):
        (out,) = double({"a": a})
        assert out.tolist() == [0.0, 2.0, 4.0]
    assert len(seen) == EAGER + 2
    assert seen[0].data_ptr() == a.ctypes.data, "nothing is copied"


@needs_a_gpu
@pytest.mark.parametrize("records", [False, True])
def test_on_a_gpu_every_call_sees_its_own_arrays(records):
    total = torch.zeros((), device="cuda")

    def add(x):
        total.add_(x["a"].sum())
        return x["a"] * 2, total

    told = Recorded(add, "cuda", records)
    for i in range(EAGER + 4):
        double, so_far = told({"a": np.full(3, i, np.float32)})
        assert double.tolist() == [2.0 * i] * 3
        assert so_far.item() == 3 * sum(range(i + 1))


@needs_a_gpu
def test_arrays_are_pinned_where_they_are_and_copied_when_they_come_elsewhere():
    told = Recorded(lambda x: (x["a"].sum(),), "cuda", records=True)
    same, windows = np.zeros(1 << 16, np.float32), np.zeros((1 << 16, 2), np.float32)
    for i in range(EAGER + 4):
        same[:] = i
        assert told({"a": same})[0].item() == i * len(same)
    assert told._ways["a"]._theirs is same
    other = np.full(1 << 16, 2, np.float32)
    assert told({"a": other})[0].item() == 2 * len(other)
    windows[:, 0] = 3
    assert told({"a": windows[:, 0]})[0].item() == 3 * len(other)
    assert told({"a": same})[0].item() == i * len(same), "and it was not written to"
    del told
    again = Recorded(lambda x: (x["a"].sum(),), "cuda", records=True)
    assert again({"a": same})[0].item() == i * len(same)
    assert again._ways["a"]._theirs is same, "the first one has let go of it"


def batch(N, rng):
    return Rollout(
        observation={"obs": rng.integers(0, 256, (2, N, 4, 84, 84), np.uint8)},
        action=rng.integers(0, 6, (1, N)),
        reward=rng.normal(size=(1, N)).astype(np.float32),
        terminated=np.zeros((1, N), np.bool_),
        valid=np.ones((1, N), np.bool_),
        extras={
            "discount": np.full((1, N), 0.99, np.float32),
            "weight": rng.random((1, N), np.float32),
        },
        once={},
        head=np.zeros(8, np.int64),
        episode_table=np.empty(0, EPISODE),
        versions=np.zeros(N, np.int64),
    )


@needs_a_gpu
def test_a_recorded_update_learns_what_one_told_kernel_by_kernel_learns():
    env = EnvSpec("Pictures", {"obs": leaf((4, 84, 84), np.uint8)}, Discrete(6))
    spec = Spec(env, Network(), 1, 1, 1, 0, None, None)
    dqn = DQN(batch_size=16, learning_rate=1e-4, dueling=True, prioritized=True, target_every=4)
    recorded, told = dqn.trainer(spec, "cuda"), dqn.trainer(spec, "cuda")
    told._step._records = False
    rng = np.random.default_rng(0)
    for _ in range(EAGER + 8):
        part = batch(16, rng)
        metrics = []
        for trainer in (recorded, told):
            trainer.take(part)
            metrics.append(trainer.finish())
        assert metrics[0] == pytest.approx(metrics[1], rel=1e-2, abs=1e-4)
        np.testing.assert_allclose(recorded.priorities(), told.priorities(), rtol=2e-2, atol=2e-3)
    assert recorded._step._graph is not None
    assert told._step._graph is None
    state = recorded.state.state()
    again = dqn.trainer(spec, "cuda")
    again.state.load_state(state)
    part = batch(16, rng)
    for trainer in (recorded, again):
        trainer.take(part)
        trainer.finish()
    np.testing.assert_allclose(recorded.params(0).flat, again.params(0).flat, rtol=1e-3, atol=1e-4)
