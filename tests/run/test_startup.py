"""A run starts fast: what takes seconds to load and is not needed stays where it is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# torch's compiler and the algebra system behind it: each costs a run about as much as torch itself does.
NOT_NEEDED = ["torch._dynamo", "sympy", "gymnasium.envs.mujoco", "matplotlib", "ray"]
PROGRAM = """
import json, sys, rookery
rookery.train(sys.argv[1], env=sys.argv[2], env_steps=1200, out=sys.argv[3], quiet=True, topology="serial", actors=1)
print(json.dumps(sorted(sys.modules)))
"""
RUNS = [("rainbow", "CartPole-v1"), ("d4pg", "Pendulum-v1")]


@pytest.mark.parametrize(("recipe", "env"), RUNS)
def test_training_loads_no_compiler(recipe, env, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, recipe, env, str(tmp_path / "run")],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert not set(NOT_NEEDED) & set(json.loads(done.stdout.splitlines()[-1]))
