"""The rival: RLlib's PPO on the CartPole of `throughput.py`. Runs in .venv-rllib; prints one JSON line.

    .venv-rllib/bin/python benchmarks/rllib_ppo.py cartpole --stock --env-steps 60000

The work per step is Rookery's: 2 runners × 4 environments × 128 steps, 4 epochs × 4 minibatches of 256, two 64×64 tanh
MLPs for policy and values. With --stock, everything else is RLlib's default. Without, the environment is Gymnasium's
own vectorised CartPole, which takes less time in the runners.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal

import rllib_appo  # sets the environment that Ray reads when it is imported

# isort: split
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

UNROLL, EPOCHS, MINIBATCH = 128, 4, 256


def configure(args: argparse.Namespace) -> PPOConfig:
    config = PPOConfig()
    config.environment("CartPole-v1")
    config.env_runners(
        num_env_runners=args.env_runners, num_envs_per_env_runner=args.envs, rollout_fragment_length=UNROLL
    )
    if not args.stock:
        config.env_runners(gym_env_vectorize_mode="vector_entry_point")
    config.learners(num_learners=args.learners)
    config.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh"))
    config.training(
        train_batch_size_per_learner=args.env_runners * args.envs * UNROLL,
        minibatch_size=MINIBATCH,
        num_epochs=EPOCHS,
        lr=2.5e-4,
        clip_param=0.1,
        entropy_coeff=0.01,
    )
    config.reporting(min_time_s_per_iteration=1)
    config.debugging(seed=1, log_level="ERROR")
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["cartpole"])
    parser.add_argument("--env-steps", type=int, required=True, help="steps to measure, after the warm-up")
    parser.add_argument("--env-runners", type=int, default=2)
    parser.add_argument("--envs", type=int, default=4, help="environments per runner")
    parser.add_argument("--learners", type=int, default=0, help="learner processes; 0: train in the main process")
    parser.add_argument("--stock", action="store_true", help="RLlib's own way to make environments")
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, rllib_appo._stop)
    signal.signal(signal.SIGTERM, rllib_appo._stop)
    logging.getLogger("ray.rllib").setLevel(logging.ERROR)
    with rllib_appo.cluster():
        speed = rllib_appo.measure(configure(args), args.env_steps)
    settings = {"ray": ray.__version__, "env_runners": args.env_runners, "envs_per_runner": args.envs}
    settings |= {"stock": args.stock, "learners": args.learners, "unroll": UNROLL, "minibatch": MINIBATCH}
    print(json.dumps({"steps_per_s": speed["steps_per_s"], "settings": settings | {"epochs": EPOCHS}}))


if __name__ == "__main__":
    main()
