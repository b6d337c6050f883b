"""What a role costs beside the work itself: the actor against a bare loop, the learner likewise.

    python benchmarks/roles.py [--rounds 9] [--seconds 0.5]

The actor runs under its driver, through a conduit, counting episodes and checking for NaN; the bare
loop is env.step, the same policy network in numpy, and a preallocated store. The learner runs under
its driver with batches that a buffer serves; the bare loop is torch with nn.Tanh, fused Adam and
clip_grad_norm_ on tensors that are ready. Rates are compared as interleaved medians of one run.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import gymnasium
import numpy as np
import torch
from measure import interleaved, medians, ratio_of_medians, save, table
from torch import nn

from tianji.algorithm import Network
from tianji.algorithms.dqn import DQN
from tianji.algorithms.ppo import PPO
from tianji.build import Built, build
from tianji.config import ScaleConfig
from tianji.driver import Serial
from tianji.env import make_env
from tianji.learner import UPDATE
from tianji.probe import Sink
from tianji.testing.algorithm import config_for, run_updates

T = 32
PPO_HYPER = PPO(learning_rate=1e-3)
DQN_HYPER = DQN(warmup=2048, capacity=50_000, new_steps=4)


def built_for(algorithm, B: int) -> Built:
    scale = ScaleConfig(envs_per_actor=B, rollout_length=T)
    config = replace(config_for(algorithm, scale=scale), network=Network(hidden=(64, 64)))
    return build(config, lambda num_envs: make_env("CartPole-v1", num_envs, {}))


def actor_rate(B: int, seconds: float) -> Callable[[], float]:
    built = built_for(PPO_HYPER, B)
    built.learner.begin()
    actor = built.actors[0]
    driver = Serial([actor, Sink(built.transport.inbox(built.assembly.lanes[0]))])

    def rate() -> float:
        begun, steps = time.perf_counter(), 0
        before = actor._seq
        while time.perf_counter() - begun < seconds:
            for _ in range(100):
                driver.step()
        steps = (actor._seq - before) * T * B
        return steps / (time.perf_counter() - begun)

    return rate


def bare_actor_rate(B: int, seconds: float) -> Callable[[], float]:
    built = built_for(PPO_HYPER, B)
    policy = built.actors[0]._policy
    policy.load(built.learner._trainer.params(0))
    env = gymnasium.make_vec("CartPole-v1", B, vectorization_mode="vector_entry_point")
    (network,), over, params = policy._networks, policy._over, policy._params
    obs = np.zeros((T + 1, B, 4), np.float32)
    action = np.zeros((T, B), np.int64)
    log_prob, reward = np.zeros((T, B), np.float32), np.zeros((T, B), np.float32)
    terminated, truncated = np.zeros((T, B), np.bool_), np.zeros((T, B), np.bool_)
    rng = np.random.default_rng(0)
    first, _ = env.reset(seed=0)
    obs[T] = first

    def rate() -> float:
        begun, steps = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            obs[0] = obs[T]
            for t in range(T):
                action[t], log_prob[t] = over.sample(network(obs[t]), params, rng)
                obs[t + 1], reward[t], terminated[t], truncated[t], _ = env.step(action[t])
            steps += T * B
        return steps / (time.perf_counter() - begun)

    return rate


def learner_rate(algorithm, B: int, seconds: float) -> Callable[[], float]:
    """Updates per second of the learner's own time: what actors and buffer take is left out."""
    built = built_for(algorithm, B)
    built.learner.begin()
    driver = Serial(built.roles)
    run_updates(built, driver, 3)

    def rate() -> float:
        driver.seconds.clear()
        updates = 0
        while sum(v for k, v in driver.seconds.items() if k.startswith("learner")) < seconds:
            if driver.step() is UPDATE:
                updates += 1
        return updates / sum(v for k, v in driver.seconds.items() if k.startswith("learner"))

    return rate


def mlp(outputs: int, activation: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, outputs)
    )


def bare_ppo_rate(B: int, seconds: float) -> Callable[[], float]:
    hyper, N = PPO_HYPER, T * B
    policy, value = mlp(2, nn.Tanh), mlp(1, nn.Tanh)
    parameters = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=hyper.learning_rate, eps=1e-5, fused=True)
    data = {
        "obs": torch.randn(N, 4), "action": torch.randint(0, 2, (N,)),
        "log_prob": torch.full((N,), -0.7), "advantage": torch.randn(N), "target": torch.randn(N),
    }  # fmt: skip

    def update() -> None:
        for _ in range(hyper.epochs):
            for rows in torch.randperm(N).chunk(hyper.minibatches):
                batch = {name: column[rows] for name, column in data.items()}
                log_p = torch.log_softmax(policy(batch["obs"]), -1)
                log_prob = log_p.gather(1, batch["action"][:, None]).squeeze(1)
                ratio = (log_prob - batch["log_prob"]).exp()
                clipped = ratio.clamp(1 - hyper.clip, 1 + hyper.clip)
                surrogate = torch.minimum(ratio * batch["advantage"], clipped * batch["advantage"])
                value_loss = (value(batch["obs"]).squeeze(1) - batch["target"]).square().mean()
                loss = -surrogate.mean() + hyper.value_coef * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, hyper.max_grad_norm)
                optimizer.step()

    return repeated(update, seconds)


def bare_dqn_rate(seconds: float) -> Callable[[], float]:
    hyper = DQN_HYPER
    online, target = mlp(2, nn.Tanh), mlp(2, nn.Tanh)
    optimizer = torch.optim.Adam(online.parameters(), lr=hyper.learning_rate, fused=True)
    N = hyper.batch_size
    now, then = torch.randn(N, 4), torch.randn(N, 4)
    action, reward = torch.randint(0, 2, (N, 1)), torch.ones(N)
    discount = torch.full((N,), hyper.gamma)

    def update() -> None:
        with torch.no_grad():
            best = online(then).argmax(-1, keepdim=True)
            goal = reward + discount * target(then).gather(-1, best).squeeze(-1)
        chosen = online(now).gather(-1, action).squeeze(-1)
        loss = nn.functional.smooth_l1_loss(chosen, goal)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), hyper.max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(online.parameters(), target.parameters(), strict=True):
                q.lerp_(p, hyper.tau)

    return repeated(update, seconds)


def repeated(update: Callable[[], None], seconds: float) -> Callable[[], float]:
    def rate() -> float:
        begun, n = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            update()
            n += 1
        return n / (time.perf_counter() - begun)

    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, results = [], {}

    def compare(what: str, unit: str, ours, bare, bar: float | None) -> None:
        samples = interleaved({"tianji": ours, "bare": bare}, arguments.rounds)
        middle = medians(samples)
        ratio, low, high = ratio_of_medians(samples["tianji"], samples["bare"])
        results[what] = {
            "unit": unit, "median": middle, "ratio": ratio, "interval": [low, high], "bar": bar,
            "samples": samples,
        }  # fmt: skip
        rows.append((
            what, f"{middle['tianji']:,.0f}", f"{middle['bare']:,.0f}", unit,
            f"{ratio:.2f} [{low:.2f}, {high:.2f}]", "-" if bar is None else f">= {bar}",
        ))  # fmt: skip

    for B, bar in ((1, None), (64, 0.8), (512, 0.8)):
        ours, bare = actor_rate(B, arguments.seconds), bare_actor_rate(B, arguments.seconds)
        compare(f"actor, {B} envs", "steps/s", ours, bare, bar)
    for B in (8, 64):
        ours = learner_rate(PPO_HYPER, B, arguments.seconds)
        compare(
            f"learner, ppo, batch {B * T}",
            "updates/s",
            ours,
            bare_ppo_rate(B, arguments.seconds),
            0.9,
        )
    ours, bare = learner_rate(DQN_HYPER, 8, arguments.seconds), bare_dqn_rate(arguments.seconds)
    compare(f"learner, dqn, batch {DQN_HYPER.batch_size}", "updates/s", ours, bare, 0.9)
    print(table(("what", "tianji", "bare", "unit", "ratio [95 %]", "bar"), rows))
    print(save("roles", {"comparisons": results}))


if __name__ == "__main__":
    main()
