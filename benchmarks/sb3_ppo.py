"""The rival: Stable-Baselines3's PPO with the settings of `throughput.py`. Runs in .venv-sb3; prints one JSON line."""

from __future__ import annotations

import argparse
import json
import time

import ale_py
import gymnasium
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack

gymnasium.register_envs(ale_py)

parser = argparse.ArgumentParser()
parser.add_argument("task", choices=["cartpole", "lunarlander", "hopper", "pong"])
parser.add_argument("--env-steps", type=int, required=True)
args = parser.parse_args()

VECTOR = {"cartpole": "CartPole-v1", "lunarlander": "LunarLander-v3", "hopper": "Hopper-v5"}
if args.task in VECTOR:
    env = make_vec_env(VECTOR[args.task], n_envs=8, seed=1)
    policy, kwargs = "MlpPolicy", {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}
else:
    env = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=8, seed=1), 4)
    policy, kwargs = "CnnPolicy", {}
model = PPO(
    policy, env, n_steps=128, batch_size=256, n_epochs=4, learning_rate=2.5e-4, clip_range=0.1, ent_coef=0.01,
    policy_kwargs=kwargs, device="cpu", seed=1,
)  # fmt: skip
model.learn(1024)  # warm-up
started = time.perf_counter()
model.learn(args.env_steps, reset_num_timesteps=False)
seconds = time.perf_counter() - started
print(json.dumps({"steps_per_s": args.env_steps / seconds}))
