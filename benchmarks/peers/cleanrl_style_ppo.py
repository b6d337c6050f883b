"""PPO on CartPole-v1 in one file, in CleanRL's style: the peer that tianji's PPO is timed against.

Settings are rl-zoo's for CartPole-v1. The script stops when the mean return of the last 100
training episodes reaches --target, and prints one JSON object as its last line.
"""

import argparse
import json
import os
import random
import time

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import nn
from torch.distributions import Categorical


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=1)
    add("--target", type=float, default=475.0, help="mean return of the last 100 episodes")
    add("--max-steps", type=int, default=100_000, help="env steps, over all envs")
    add(
        "--t0",
        type=float,
        default=None,
        help="time.time() of the launch; read from /proc if absent",
    )
    add("--threads", type=int, default=1, help="torch threads")
    add("--env-id", default="CartPole-v1")
    add("--num-envs", type=int, default=8)
    add("--num-steps", type=int, default=32, help="steps per env and rollout")
    add("--minibatch-size", type=int, default=256)
    add("--update-epochs", type=int, default=20)
    add("--learning-rate", type=float, default=1e-3)
    add(
        "--anneal",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="learning rate and clip range fall linearly to 0 at --max-steps",
    )
    add("--gamma", type=float, default=0.98)
    add("--gae-lambda", type=float, default=0.8)
    add("--clip-coef", type=float, default=0.2)
    add("--ent-coef", type=float, default=0.0)
    add("--vf-coef", type=float, default=0.5)
    add("--max-grad-norm", type=float, default=0.5)
    return parser.parse_args()


def process_age() -> float:
    """Seconds since the kernel started this process, to a clock tick (10 ms)."""
    with open("/proc/self/stat") as f:
        started_ticks = int(f.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def init_layer(layer: nn.Linear, std: float = 2**0.5) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self, obs_size: int, num_actions: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            init_layer(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            init_layer(nn.Linear(64, 64)),
            nn.Tanh(),
            init_layer(nn.Linear(64, 1), std=1.0),
        )
        self.actor = nn.Sequential(
            init_layer(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            init_layer(nn.Linear(64, 64)),
            nn.Tanh(),
            init_layer(nn.Linear(64, num_actions), std=0.01),
        )

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        return self.critic(obs).squeeze(-1)

    def policy(self, obs: torch.Tensor) -> Categorical:
        return Categorical(logits=self.actor(obs), validate_args=False)


def main() -> None:
    args = parse_args()
    launched = args.t0 if args.t0 is not None else time.time() - process_age()
    torch.set_num_threads(args.threads)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    envs = RecordEpisodeStatistics(
        SyncVectorEnv(
            [lambda: gym.make(args.env_id) for _ in range(args.num_envs)],
            autoreset_mode=AutoresetMode.SAME_STEP,
        ),
        buffer_length=100,
    )
    obs_shape = envs.single_observation_space.shape
    agent = Agent(int(np.prod(obs_shape)), int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    T, N = args.num_steps, args.num_envs
    obs = torch.zeros((T, N, *obs_shape))
    actions = torch.zeros((T, N), dtype=torch.long)
    log_probs = torch.zeros((T, N))
    rewards = torch.zeros((T, N))
    dones = torch.zeros((T, N))
    values = torch.zeros((T, N))
    advantages = torch.zeros((T, N))

    batch_size = T * N
    num_iterations = args.max_steps // batch_size
    global_step = 0
    reached = False
    next_obs, _ = envs.reset(seed=args.seed)
    next_obs = torch.from_numpy(next_obs)
    start_s = time.time() - launched

    for iteration in range(num_iterations):
        left = 1.0 - iteration / num_iterations if args.anneal else 1.0
        optimizer.param_groups[0]["lr"] = left * args.learning_rate
        clip = left * args.clip_coef

        for t in range(T):
            global_step += N
            obs[t] = next_obs
            with torch.no_grad():
                policy = agent.policy(next_obs)
                action = policy.sample()
                values[t] = agent.value(next_obs)
                log_probs[t] = policy.log_prob(action)
            actions[t] = action

            next_obs, reward, terminated, truncated, info = envs.step(action.numpy())
            if truncated.any():
                # The episode was cut, not over: its last state still has a value.
                for i in np.flatnonzero(truncated & ~terminated):
                    with torch.no_grad():
                        last = agent.value(torch.from_numpy(info["final_obs"][i]))
                    reward[i] += args.gamma * last.item()
            next_obs = torch.from_numpy(next_obs)
            rewards[t] = torch.from_numpy(reward)
            dones[t] = torch.from_numpy(terminated | truncated)

            if "episode" in info and len(envs.return_queue) == 100:
                reached = bool(np.mean(envs.return_queue) >= args.target)
                if reached:
                    break
        if reached:
            break

        with torch.no_grad():
            next_value = agent.value(next_obs)
            last_advantage = torch.zeros(N)
            for t in reversed(range(T)):
                live = 1.0 - dones[t]
                delta = rewards[t] + args.gamma * live * next_value - values[t]
                last_advantage = delta + args.gamma * args.gae_lambda * live * last_advantage
                advantages[t] = last_advantage
                next_value = values[t]
            returns = advantages + values

        b_obs = obs.reshape(batch_size, *obs_shape)
        b_actions = actions.reshape(-1)
        b_log_probs = log_probs.reshape(-1)
        b_advantages = advantages.reshape(-1)
        b_returns = returns.reshape(-1)

        for _ in range(args.update_epochs):
            order = torch.randperm(batch_size)
            for start in range(0, batch_size, args.minibatch_size):
                mb = order[start : start + args.minibatch_size]
                policy = agent.policy(b_obs[mb])
                ratio = (policy.log_prob(b_actions[mb]) - b_log_probs[mb]).exp()

                mb_advantages = b_advantages[mb]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (
                    mb_advantages.std() + 1e-8
                )
                policy_loss = -torch.min(
                    ratio * mb_advantages, ratio.clamp(1 - clip, 1 + clip) * mb_advantages
                ).mean()
                value_loss = 0.5 * ((agent.value(b_obs[mb]) - b_returns[mb]) ** 2).mean()
                loss = policy_loss + args.vf_coef * value_loss
                if args.ent_coef:
                    loss = loss - args.ent_coef * policy.entropy().mean()

                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

    wall_s = time.time() - launched
    result = {
        "reached": reached,
        "wall_s": round(wall_s, 3),
        "start_s": round(start_s, 3),
        "steps": global_step,
        "episodes": int(envs.episode_count),
        "return_mean": round(float(np.mean(envs.return_queue)), 2) if envs.return_queue else None,
    }
    envs.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
