"""Descriptors: an environment that leaks them ends its run, and what was learnt is saved all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import gymnasium

import rookery
from rookery.envs.scripted import Counter
from rookery.processes.reserve import Reserve

LONG = 120.0  # seconds: never reached unless something is broken
SMALL = ["--algo.unroll", "16", "--algo.epochs", "1", "--algo.minibatches", "1", "--envs-per-actor", "2", "--quiet"]
PROGRAM = """
import resource, sys
from rookery.cli.main import main
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
sys.exit(main(sys.argv[1:]))
"""


class Leaky(Counter):
    def step(self, action: Any) -> Any:
        os.dup(0)
        return super().step(action)


def leaky(leaks: bool = True) -> gymnasium.Env:
    return Leaky() if leaks else Counter()


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_run_whose_environment_leaks_all_descriptors_is_saved_and_can_be_resumed(tmp_path):
    out = tmp_path / "run"
    words = ["train", "ppo", "--env", "test_reserve:leaky", "--preset", "vector", "--topology", "serial", *SMALL]
    words += ["--env-steps", "100000", "--supervisor.restarts", "0", "--out", str(out)]
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=LONG,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "Too many open files" in done.stderr and "what was learnt is saved" in done.stderr
    run = rookery.resume(out, ("test_reserve",), env_steps=400, env_kwargs={"leaks": False})
    assert run.summary["env_steps"] >= 400


def test_it_is_given_up_for_a_checkpoint_and_taken_back():
    before = opened()
    reserve = Reserve(10)
    with reserve.lent():
        assert opened() == before
    assert opened() == before, "outside of the loop nothing is kept back"
    with reserve:
        assert opened() == before + 10
        with reserve.lent():
            assert opened() == before
        assert opened() == before + 10
    assert opened() == before
