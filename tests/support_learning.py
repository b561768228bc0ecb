"""How learning is measured: train with a recipe's own preset, then play greedily."""

from __future__ import annotations

from pathlib import Path

import rookery
from rookery.envs.make import make
from rookery.play.evaluate import evaluate


def learnt(tmp_path: Path, recipe: str, env: str, env_steps: int, seed: int, **fields) -> float:
    """Mean return of 100 greedy episodes after training."""
    out = str(tmp_path / f"{recipe}-{seed}")
    run = rookery.train(recipe, env=env, env_steps=env_steps, seed=seed, out=out, quiet=True, **fields)
    lanes = make(run.config, 10, training=False)
    result = evaluate(rookery.load(run.path), lanes, episodes=100, seed=7)
    lanes.close()
    print(f"{recipe} {env} seed {seed} {fields}: {result.return_mean:.2f} ± {result.return_std:.2f}")
    return result.return_mean
