import subprocess
import sys

import pytest
import torch

from rookery.core.config import RunConfig
from rookery.processes import threads
from rookery.processes.threads import Budget, Threads, budget, limit_child_env


@pytest.mark.parametrize("topology", ["serial", "local"])
def test_a_synchronous_learner_has_every_core_and_acting_has_one(topology):
    assert budget(8, 8, topology) == Budget(acting=1, learning=8)


@pytest.mark.parametrize("cores, actors, learning", [(8, 6, 2), (8, 8, 1), (2, 16, 1), (1, 1, 1)])
def test_an_asynchronous_learner_has_what_the_actors_leave(cores, actors, learning):
    assert budget(cores, actors, "local", synchronous=False) == Budget(1, learning)


def config(**fields):
    return RunConfig(recipe="", algorithm="", env="", algo=None, **fields)


@pytest.fixture
def counted(monkeypatch):
    """Every number that torch was told, starting from 7."""
    numbers = [7]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    return numbers


def test_torch_is_told_only_when_the_number_changes(counted):
    switch = Threads(config(threads=4))
    for _ in range(3):
        switch.acting()
        switch.acting()
        switch.learning()
        switch.learning()
    assert counted == [7, 1, 4, 1, 4, 1, 4]
    switch.restore()
    assert counted[-1] == 7


def test_all_cores_are_the_default(counted, monkeypatch):
    monkeypatch.setattr(threads, "available_cores", lambda: 12)
    assert Threads(config()).budget.learning == 12


def test_children_are_held_to_one_thread():
    limits = limit_child_env()
    assert limits["OMP_NUM_THREADS"] == limits["MKL_NUM_THREADS"] == limits["OPENBLAS_NUM_THREADS"] == "1"
    assert set(limits.values()) == {"1"}


@pytest.mark.parametrize(
    "module",
    ["pipes.shm", "pipes.channel", "processes.worker", "processes.faults", "processes.signals", "crews.actor_main"],
)
def test_a_child_does_not_pay_for_torch(module):
    script = f"import sys, rookery.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0
