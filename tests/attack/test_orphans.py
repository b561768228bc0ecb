"""What environments start ends with the worker, with the run, and after a kill -9 of the trainer: nobody is left.

With real processes, most of them started by the command line. ROOKERY_ATTACK_ROUNDS=N adds N/50 rounds of random ends.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support_orphans import LONG, WAYS, clear, environment, guards, living, until, workers

import rookery
from rookery.storage import checkpoint

ROUNDS = int(os.environ.get("ROOKERY_ATTACK_ROUNDS", "0")) // 50  # four seconds each
SMALL = {"algo": {"unroll": 16, "epochs": 1, "minibatches": 1}, "envs_per_actor": 1, "quiet": True, "preset": "vector"}
COMMAND = [sys.executable, "-m", "rookery", "train", "ppo", "--env", "support_orphans:breeding", "--preset", "vector",
           "--algo.unroll", "16", "--algo.epochs", "1", "--algo.minibatches", "1", "--quiet", "--envs-per-actor", "1",
           "--checkpoint.every", "64", "--env-steps", "100000000"]  # fmt: skip
ACTORS = {"serial": 1, "local": 2}


def breeding(nest: Path, again_at: int = 10) -> dict[str, Any]:
    return {"folder": str(nest), "ways": list(WAYS), "again_at": again_at}


class Attack:
    """A run that goes on, of an environment that starts processes."""

    def __init__(self, tmp_path: Path, topology: str, again_at: int = 10):
        self.out, self.nest, self.topology = tmp_path / "run", tmp_path / "nest", topology
        self.nest.mkdir()
        kwargs = ["--env-kwargs", json.dumps(breeding(self.nest, again_at))]
        where = ["--topology", topology, "--actors", str(ACTORS[topology]), "--out", str(self.out)]
        self.told = tmp_path / "told"
        with self.told.open("w") as told:
            self.process = subprocess.Popen([*COMMAND, *kwargs, *where], env=environment(), stdout=told, stderr=told)

    def __enter__(self) -> Attack:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(LONG)
        clear(self.nest)

    def is_up(self) -> None:
        """Every environment has started all its processes, twice, and something can be resumed."""
        full = 2 * ACTORS[self.topology] * len(WAYS)
        until(lambda: len(living(self.nest)) == full, f"{full} processes")
        until(lambda: checkpoint.all_steps(self.out / "checkpoints"), "a checkpoint")

    def workers(self) -> list[int]:
        return workers(self.out, self.nest)

    def ended(self) -> int:
        code = self.process.wait(LONG)
        print(self.told.read_text())
        return code

    def leaves_nobody(self) -> None:
        until(lambda: not living(self.nest), "the end of what the environments had started")
        until(lambda: not self.workers() and not guards(self.process.pid), "the end of workers and guards")

    def can_be_resumed(self) -> None:
        steps = max(checkpoint.all_steps(self.out / "checkpoints")) + 64
        quietly = breeding(self.nest) | {"ways": []}
        run = rookery.resume(
            self.out, ("support_orphans",), env_steps=steps, env_kwargs=quietly, topology="serial", fault_plan=""
        )
        assert run.summary["env_steps"] >= steps


@pytest.mark.parametrize("topology", ACTORS)
def test_nobody_is_left_after_the_normal_end_of_a_run_and_nobody_else_is_touched(tmp_path, topology):
    nest, limit = tmp_path / "nest", resource.getrlimit(10)
    nest.mkdir()
    bystander = subprocess.Popen(["sleep", "3600"])
    try:
        run = rookery.train(
            "ppo", env="support_orphans:breeding", env_kwargs=breeding(nest), topology=topology,
            actors=ACTORS[topology], env_steps=200, out=str(tmp_path / "run"), **SMALL,
        )  # fmt: skip
        assert run.summary["exit_reason"] == "env_steps"
        assert living(nest) == [] and guards(os.getpid()) == [] and workers(run.path, nest) == []
        assert bystander.poll() is None and resource.getrlimit(10) == limit
    finally:
        clear(nest)
        bystander.kill()
        bystander.wait(LONG)


@pytest.mark.parametrize("topology", ACTORS)
def test_nobody_is_left_after_sigterm(tmp_path, topology):
    with Attack(tmp_path, topology) as attack:
        attack.is_up()
        attack.process.send_signal(signal.SIGTERM)
        assert attack.ended() == 75
        attack.leaves_nobody()
        attack.can_be_resumed()


def test_nobody_is_left_after_kill_9_of_a_serial_trainer_and_its_folder_is_free(tmp_path):
    with Attack(tmp_path, "serial") as attack:
        attack.is_up()
        attack.process.kill()
        attack.ended()
        attack.leaves_nobody()
        attack.can_be_resumed()


def test_nobody_is_left_after_kill_9_of_a_worker_and_of_the_trainer(tmp_path):
    with Attack(tmp_path, "local") as attack:
        attack.is_up()
        victim, other = attack.workers()
        before, half = set(living(attack.nest)), 2 * len(WAYS)
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(before & set(living(attack.nest))) == half, "the end of what the worker had started")
        until(lambda: len(set(living(attack.nest)) - before) == half, "the replacement, which starts as many")
        assert other in attack.workers() and len(before & set(living(attack.nest))) == half
        attack.process.kill()
        attack.ended()
        attack.leaves_nobody()
        attack.can_be_resumed()


if ROUNDS:

    @pytest.mark.parametrize("round", range(ROUNDS))
    def test_nobody_is_left_after_a_random_end_at_a_random_time(tmp_path, round):
        seed = int(os.environ.get("ROOKERY_ATTACK_SEED", "0")) or random.randrange(1, 10**9)
        print(f"ROOKERY_ATTACK_SEED={seed}, round {round}")
        chance = random.Random(f"{seed}.{round}")
        with Attack(tmp_path, chance.choice(list(ACTORS)), chance.randrange(1, 200)) as attack:
            few = chance.randrange(1, len(WAYS) + 1)
            until(lambda: len(living(attack.nest)) >= few or attack.process.poll() is not None, "a beginning")
            with pytest.raises(subprocess.TimeoutExpired):
                attack.process.wait(chance.choice([0.0, 0.01, 0.1, 1.0, 3.0]))
            for _ in range(chance.randrange(3)):
                if victims := attack.workers():
                    os.kill(chance.choice(victims), chance.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV]))
            attack.process.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
            if chance.random() < 0.5:
                attack.process.send_signal(signal.SIGUSR1)
            attack.ended()
            attack.leaves_nobody()
