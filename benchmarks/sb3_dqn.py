"""The rival: Stable-Baselines3's DQN with the settings of `throughput.py`. Runs in .venv-sb3; prints one JSON line."""

from __future__ import annotations

import argparse
import json
import time

import ale_py
import gymnasium
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

gymnasium.register_envs(ale_py)

parser = argparse.ArgumentParser()
parser.add_argument("task", choices=["pong"])
parser.add_argument("--env-steps", type=int, required=True)
args = parser.parse_args()

env = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=1, seed=1), 4)
model = DQN(
    "CnnPolicy", env, learning_rate=1e-4, buffer_size=20_000, learning_starts=1_000, batch_size=32, train_freq=4,
    gradient_steps=1, target_update_interval=10_000, exploration_fraction=0.1, exploration_final_eps=0.1,
    optimize_memory_usage=False, device="cpu", seed=1,
)  # fmt: skip
model.learn(1_200)  # warm-up: the memory is filled and the first updates are made
started = time.perf_counter()
model.learn(args.env_steps, reset_num_timesteps=False)
print(json.dumps({"steps_per_s": args.env_steps / (time.perf_counter() - started)}))
