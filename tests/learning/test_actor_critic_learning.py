"""A2C, A3C, UNREAL, IMPALA, asynchronous PPO and IMPACT learn: fixed seeds, measured by greedy evaluation.

The short ones run in `make test`, in `serial` with a fixed lag, so that they repeat. The long ones run under
`make test-learning` with actor processes, and their results differ from run to run.
"""

from __future__ import annotations

import pytest
from support_learning import learnt

SEEDS = (1, 2, 3)
CARTPOLE = ("a2c", "a3c", "impala", "appo", "impact")
CATCH = {
    "impala": {},
    "appo": {"algo": {"autoencoder": {"on": True}}},
    "unreal": {},
}
TMAZE = {"impala": "lstm", "appo": "gru", "a3c": "lstm"}
LAGGED = {"topology": "serial", "actors": 2}
LATE = {"topology": "serial", "actors": 1, "algo": {"queue": {"lag": 20}, "lr": 2e-3, "entropy": 0.003}}


def test_impala_learns_cartpole_with_two_actors(tmp_path):
    """200,000 steps: after 100,000 about one seed in four still plays below 300."""
    lagged = LAGGED | {"algo": {"queue": {"lag": 2}}}
    assert learnt(tmp_path, "impala", "CartPole-v1", 200_000, seed=1, **lagged) >= 400


@pytest.mark.learning
def test_appo_with_an_autoencoder_learns_catch_in_serial(tmp_path):
    lagged = LAGGED | {"algo": CATCH["appo"]["algo"] | {"queue": {"lag": 2}}}
    assert learnt(tmp_path, "appo", "rookery/Catch-v0", 30_000, seed=1, **lagged) >= 0.9


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("recipe", CARTPOLE)
def test_cartpole(tmp_path, recipe, seed):
    assert learnt(tmp_path, recipe, "CartPole-v1", 200_000, seed) >= 475


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("recipe", ["appo", "impact"])
def test_pendulum(tmp_path, recipe, seed):
    assert learnt(tmp_path, recipe, "Pendulum-v1", 400_000, seed) >= -250


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("recipe", CATCH)
def test_catch_on_pixels(tmp_path, recipe, seed):
    assert learnt(tmp_path, recipe, "rookery/Catch-v0", 150_000, seed, **CATCH[recipe]) >= 0.95


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("recipe", TMAZE)
def test_tmaze_needs_memory(tmp_path, recipe, seed):
    core = {"net": {"core": TMAZE[recipe]}}
    assert learnt(tmp_path / "core", recipe, "rookery/TMaze-v0", 300_000, seed, **core) >= 0.95
    assert 0.3 <= learnt(tmp_path / "none", recipe, "rookery/TMaze-v0", 50_000, seed) <= 0.7


@pytest.mark.learning
def test_correction_matters_with_a_lag_of_20_updates(tmp_path):
    """In one process every batch is exactly 20 versions old: V-trace learns, without it the same run does worse."""

    def mean(correct: bool) -> float:
        late = LATE | {"algo": LATE["algo"] | {"correct": correct}}
        returns = [
            learnt(tmp_path / str(correct), "impala", "rookery/Catch-v0", 80_000, seed, **late) for seed in SEEDS
        ]
        return sum(returns) / len(SEEDS)

    corrected, plain = mean(True), mean(False)
    assert corrected >= 0.5 and corrected > plain + 0.3, (corrected, plain)
