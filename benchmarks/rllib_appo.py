"""The rival: RLlib's APPO on the Pong of `throughput.py`'s `appo-pong`. Runs in .venv-rllib; prints one JSON line.

    .venv-rllib/bin/python benchmarks/rllib_appo.py pong --env-steps 40000

The work per step is Rookery's: the same native vector environment of ale-py (42×42 grey, 4 frames stacked, frame
skip 4, no sticky actions, minimal action set, clipped rewards), the same network, unrolls of 50, batches of 500, each
trained on once. Everything else is RLlib's default (Adam, lr 5e-4, V-trace, a target network), except settings that
make RLlib faster on two cores without changing the algorithm:
- the environment is RLlib's `vector_entry_point`, and frames stay uint8 until they are in the network. With
  `wrap_atari_for_new_api_stack` and the default network, float frames and Python wrappers halve the speed;
- the main process waits 20 ms for samples. By default it polls without a pause and takes a core from the samplers;
- batches go through a plain queue. The circular buffer, with one use per batch, does the same and polls;
- 10 environments per runner: a fragment of a runner is then exactly one batch.

With --stock it is RLlib as its own Atari examples have it: its wrappers and its default network with the same layers,
and its own defaults for everything else; frames, unrolls, batches and passes are the same.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",  # there is a process per core already
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only: `_node_ip_address="127.0.0.1"` alone is ignored
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}

import ale_py
import gymnasium
import psutil
import ray
import ray.tune.trainable.trainable
import torch
from ale_py.vector_env import AtariVectorEnv
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import TARGET_NETWORK_ACTION_DIST_INPUTS, TargetNetworkAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack
from ray.tune.registry import register_env
from torch import nn

UNROLL, BATCH = 50, 500
WARM_UP = 5_000  # steps: ten batches
START_S, STOP_S = 180, 60  # limits of starting and of stopping
SLOWEST = 50  # steps/s; a slower run is ended with an error


class Pong(AtariVectorEnv):
    """Without infos: RLlib would turn them into one dict per environment and step, and uses none."""

    def __init__(self, context: dict[str, Any]):
        super().__init__("pong", context["num_envs"], num_threads=1, img_height=42, img_width=42, noop_max=31)

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        return super().reset(**kwargs)[0], {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict]:
        return *super().step(actions)[:4], {}


class Net(TorchRLModule, ValueFunctionAPI, TargetNetworkAPI):
    """Rookery's torso `nips` with 256 features. RLlib's default network differs: padding, floats, channels last."""

    def setup(self) -> None:
        self.body = nn.Sequential(
            nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 3 * 3, 256), nn.ReLU(),
        )  # fmt: skip
        self.policy, self.value = nn.Linear(256, self.action_space.n), nn.Linear(256, 1)

    def _features(self, body: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return body(batch[Columns.OBS].float().mul_(1 / 255))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.policy(self._features(self.body, batch))}

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features = self._features(self.body, batch)
        return {Columns.ACTION_DIST_INPUTS: self.policy(features), Columns.EMBEDDINGS: features}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        features = self._features(self.body, batch) if embeddings is None else embeddings
        return self.value(features).squeeze(-1)

    def make_target_networks(self) -> None:
        self.target_body, self.target_policy = make_target_network(self.body), make_target_network(self.policy)

    def get_target_network_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        return [(self.body, self.target_body), (self.policy, self.target_policy)]

    def forward_target(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {TARGET_NETWORK_ACTION_DIST_INPUTS: self.target_policy(self._features(self.target_body, batch))}


def wrapped(context: Any) -> gymnasium.Env:
    """Pong as RLlib's examples make it."""
    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0, full_action_space=False)
    return wrap_atari_for_new_api_stack(env, dim=42, framestack=4)


def stock(args: argparse.Namespace) -> APPOConfig:
    """RLlib's defaults, with the same frames, layers and work per step."""
    register_env("stock-pong", wrapped)
    config = APPOConfig()
    config.environment("stock-pong", clip_rewards=True)
    config.env_runners(
        num_env_runners=args.env_runners, num_envs_per_env_runner=args.envs, rollout_fragment_length=UNROLL
    )
    config.learners(num_learners=args.learners)
    model = DefaultModelConfig(
        conv_filters=[[16, 8, 4], [32, 4, 2]], conv_activation="relu", head_fcnet_hiddens=[256], vf_share_layers=True
    )
    config.rl_module(model_config=model)
    config.training(train_batch_size_per_learner=BATCH, num_epochs=1, circular_buffer_iterations_per_batch=1)
    config.reporting(min_time_s_per_iteration=1)
    config.debugging(seed=1, log_level="ERROR")
    return config


def configure(args: argparse.Namespace) -> APPOConfig:
    config = APPOConfig()
    config.environment(Pong)
    config.env_runners(
        num_env_runners=args.env_runners,
        num_envs_per_env_runner=args.envs,
        gym_env_vectorize_mode="vector_entry_point",
        rollout_fragment_length=UNROLL,
    )
    config.learners(num_learners=args.learners)
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=Net))
    config.training(
        train_batch_size_per_learner=BATCH,
        num_epochs=1,
        lr=5e-4,
        use_circular_buffer=False,
        circular_buffer_iterations_per_batch=1,  # no buffer, but the period of the target network is counted with it
        timeout_s_sampler_manager=0.02,
    )
    config.reporting(min_time_s_per_iteration=1)
    config.debugging(seed=1, log_level="ERROR")
    return config


def measure(config: APPOConfig, env_steps: int) -> dict[str, float]:
    """Steps per second after the warm-up: sampled, and trained on."""
    signal.alarm(START_S)
    algorithm = config.build_algo()
    try:
        start = _progress(algorithm, WARM_UP)
        signal.alarm(60 + env_steps // SLOWEST)
        end = _progress(algorithm, start[1] + env_steps)
    finally:
        signal.alarm(STOP_S)
        algorithm.stop()
    seconds, sampled, trained = (after - before for before, after in zip(start, end))
    # RLlib counts the row behind each unroll, whose value closes it, as trained on.
    return {"steps_per_s": sampled / seconds, "trained_per_s": trained / seconds * UNROLL / (UNROLL + 1)}


def _progress(algorithm: Any, env_steps: int) -> tuple[float, float, float]:
    """Train up to that many steps in all: the time, and the steps sampled and trained on."""
    while True:
        result = algorithm.train()
        sampled = result.get("env_runners", {}).get("num_env_steps_sampled_lifetime", 0)
        learners = result.get("learners", {})  # absent before the first update
        trained = learners.get("__all_modules__", {}).get("num_env_steps_trained_lifetime", 0)
        if sampled >= env_steps and trained > 0:
            return time.perf_counter(), float(sampled), float(trained)


@contextmanager
def cluster() -> Iterator[None]:
    """Ray on this machine alone. All its files are in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="rllib-") as folder:
        ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH = folder  # else ~/ray_results
        signal.alarm(START_S)
        try:
            ray.init(
                address="local",
                num_cpus=8,  # what RLlib may book, not what there is
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=2**30,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
            yield
        finally:
            signal.alarm(STOP_S)
            started = psutil.Process().children(recursive=True)
            try:
                ray.shutdown()  # does not wait for a runner that is amid a fragment
            finally:
                signal.alarm(0)
                for process in psutil.wait_procs(started, timeout=STOP_S)[1]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()


def _stop(number: int, frame: Any) -> None:
    raise TimeoutError("RLlib took too long") if number == signal.SIGALRM else SystemExit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["pong"])
    parser.add_argument("--env-steps", type=int, required=True, help="steps to measure, after the warm-up")
    parser.add_argument("--env-runners", type=int, default=2)
    parser.add_argument("--envs", type=int, default=10, help="environments per runner")
    parser.add_argument("--learners", type=int, default=0, help="learner processes; 0: train in the main process")
    parser.add_argument("--stock", action="store_true", help="RLlib's own wrappers, network and defaults")
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, _stop)
    signal.signal(signal.SIGTERM, _stop)
    logging.getLogger("ray.rllib").setLevel(logging.ERROR)
    with cluster():
        speed = measure(stock(args) if args.stock else configure(args), args.env_steps)
    settings = {"ray": ray.__version__, "env_runners": args.env_runners, "envs_per_runner": args.envs}
    fragment = args.envs * UNROLL
    batch = math.ceil(BATCH / fragment) * fragment  # RLlib trains on whole fragments
    settings |= {"stock": args.stock, "learners": args.learners, "unroll": UNROLL, "batch": batch, "epochs": 1}
    print(json.dumps(speed | {"settings": settings}))


if __name__ == "__main__":
    main()
