"""DQN on CartPole-v1 in one file, in CleanRL's style: the peer that tianji's DQN is timed against.

rl-zoo's CartPole settings with double Q-learning, soft targets, fewer and larger updates, and a
learning rate of 5e-4: its own 2.3e-3 with these lost the policy on 2 of 5 seeds. The script
stops when the mean return of the last 100 training episodes reaches --target, and prints one JSON
object as its last line.
"""

import argparse
import json
import os
import random
import time
from collections import deque

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=1)
    add("--target", type=float, default=300.0, help="mean return of the last 100 episodes")
    add("--max-steps", type=int, default=200_000, help="env steps")
    add(
        "--t0",
        type=float,
        default=None,
        help="time.time() of the launch; read from /proc if absent",
    )
    add("--threads", type=int, default=1, help="torch threads")
    add("--env-id", default="CartPole-v1")
    add("--buffer-size", type=int, default=100_000)
    add("--learning-starts", type=int, default=1_000, help="env steps before the first update")
    add("--train-frequency", type=int, default=8, help="env steps between trainings")
    add("--gradient-steps", type=int, default=2, help="updates per training")
    add("--batch-size", type=int, default=128)
    add("--learning-rate", type=float, default=5e-4)
    add(
        "--anneal",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="learning rate falls linearly to 0 at --max-steps",
    )
    add("--gamma", type=float, default=0.99)
    add("--tau", type=float, default=0.01, help="share of the online net in each target update")
    add("--max-grad-norm", type=float, default=10.0)
    add("--start-e", type=float, default=1.0)
    add("--end-e", type=float, default=0.04)
    add("--exploration-steps", type=int, default=8_000, help="16 % of rl-zoo's 50k steps")
    return parser.parse_args()


def process_age() -> float:
    """Seconds since the kernel started this process, to a clock tick (10 ms)."""
    with open("/proc/self/stat") as f:
        started_ticks = int(f.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


class ReplayBuffer:
    def __init__(self, size: int, obs_shape: tuple[int, ...]) -> None:
        self.size, self.filled, self.at = size, 0, 0
        self.obs = np.zeros((size, *obs_shape), np.float32)
        self.next_obs = np.zeros((size, *obs_shape), np.float32)
        self.actions = np.zeros(size, np.int64)
        self.rewards = np.zeros(size, np.float32)
        self.terminated = np.zeros(size, np.float32)

    def add(self, obs, next_obs, action, reward, terminated) -> None:
        self.obs[self.at] = obs
        self.next_obs[self.at] = next_obs
        self.actions[self.at] = action
        self.rewards[self.at] = reward
        self.terminated[self.at] = terminated
        self.at = (self.at + 1) % self.size
        self.filled = min(self.filled + 1, self.size)

    def sample(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        rows = np.random.randint(self.filled, size=batch_size)
        columns = (self.obs, self.next_obs, self.actions, self.rewards, self.terminated)
        return tuple(torch.from_numpy(column[rows]) for column in columns)


def q_network(obs_size: int, num_actions: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(obs_size, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, num_actions),
    )


def main() -> None:
    args = parse_args()
    launched = args.t0 if args.t0 is not None else time.time() - process_age()
    torch.set_num_threads(args.threads)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    env = gym.make(args.env_id)
    env.action_space.seed(args.seed)
    obs_shape = env.observation_space.shape
    obs_size, num_actions = int(np.prod(obs_shape)), int(env.action_space.n)
    online, target = q_network(obs_size, num_actions), q_network(obs_size, num_actions)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=args.learning_rate)
    buffer = ReplayBuffer(args.buffer_size, obs_shape)

    returns: deque[float] = deque(maxlen=100)
    episodes, episode_return, reached, global_step = 0, 0.0, False, 0
    obs, _ = env.reset(seed=args.seed)
    start_s = time.time() - launched

    while global_step < args.max_steps:
        explored = min(global_step / args.exploration_steps, 1.0)
        if random.random() < args.start_e + explored * (args.end_e - args.start_e):
            action = int(env.action_space.sample())
        else:
            with torch.no_grad():
                action = int(online(torch.from_numpy(obs)).argmax())

        next_obs, reward, terminated, truncated, _ = env.step(action)
        global_step += 1
        buffer.add(obs, next_obs, action, reward, terminated)
        obs = next_obs
        episode_return += float(reward)
        if terminated or truncated:
            returns.append(episode_return)
            episodes, episode_return = episodes + 1, 0.0
            reached = len(returns) == 100 and bool(np.mean(returns) >= args.target)
            if reached:
                break
            obs, _ = env.reset()

        if global_step < args.learning_starts or global_step % args.train_frequency:
            continue
        if args.anneal:
            left = 1.0 - global_step / args.max_steps
            optimizer.param_groups[0]["lr"] = left * args.learning_rate
        for _ in range(args.gradient_steps):
            b_obs, b_next_obs, b_actions, b_rewards, b_terminated = buffer.sample(args.batch_size)
            with torch.no_grad():
                best = online(b_next_obs).argmax(1, keepdim=True)
                next_q = target(b_next_obs).gather(1, best).squeeze(1)
                td_target = b_rewards + args.gamma * (1.0 - b_terminated) * next_q
            q = online(b_obs).gather(1, b_actions.unsqueeze(1)).squeeze(1)
            loss = F.smooth_l1_loss(q, td_target)

            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(online.parameters(), args.max_grad_norm)
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                    slow.lerp_(fast, args.tau)

    wall_s = time.time() - launched
    result = {
        "reached": reached,
        "wall_s": round(wall_s, 3),
        "start_s": round(start_s, 3),
        "steps": global_step,
        "episodes": episodes,
        "return_mean": round(float(np.mean(returns)), 2) if returns else None,
    }
    env.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
