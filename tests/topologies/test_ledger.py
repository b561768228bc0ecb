"""The ledger in metrics.jsonl: it balances in every record, not only where a checkpoint is written."""

from __future__ import annotations

import pytest

import rookery
from rookery.metrics.sink import read_records

REPLAY = {"min_size": 60, "batch": 16, "capacity": 300, "samples_per_insert": 2.0}
SEQUENCES = {"sequence": 8, "burn_in": 4, "overlap": 4, "unroll": 6, "replay": REPLAY | {"min_size": 10, "batch": 4}}
PPO = {"unroll": 16, "epochs": 1, "minibatches": 2}
APEX = {"unroll": 5, "n_step": 3, "replay": REPLAY | {"samples_per_insert": 0.0, "start": "actor", "loaders": 2}}
CASES = {
    "ppo": ("ppo", "CartPole-v1", "serial", PPO),
    "dqn": ("dqn", "CartPole-v1", "serial", {"replay": REPLAY, "n_step": 3}),
    "r2d2": ("r2d2", "rookery/TMaze-v0", "serial", SEQUENCES),
    "apex": ("apex_dqn", "rookery/Faulty-v0", "local", APEX),
    "gorila": ("gorila", "rookery/Faulty-v0", "async_grads", {"replay": REPLAY}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_balances_in_every_record(tmp_path, case):
    """On the way an actor fails, or one environment of it; what they held back is lost."""
    recipe, env, topology, algo = CASES[case]
    how = {"fault_plan": "actor[1]@env_step=70:raise", "actors": 2}
    if "Faulty" in env:
        how = {"env_kwargs": {"at_episode": 10, "marker": str(tmp_path / "struck")}, "preset": "vector", "actors": 1}
    run = rookery.train(
        recipe, env=env, topology=topology, algo=algo, envs_per_actor=2, env_steps=800, quiet=True,
        out=str(tmp_path / "run"), log_every=0, checkpoint={"every": 300}, **how,
    )  # fmt: skip
    ledgers = [record["ledger"] for record in read_records(run.path / "metrics.jsonl") if record["kind"] == "train"]
    assert len(ledgers) > 5 and run.summary["restarts"] == 1
    for number, ledger in enumerate(ledgers):
        gone = ledger["trained"] + ledger["evicted"] + sum(ledger["dropped"].values())
        assert ledger["collected"] == gone + ledger["in_flight"], (number, ledger)
    if case != "ppo":  # there nothing waits where a record is written
        assert any(ledger["in_flight"] for ledger in ledgers[:-1]) and sum(ledgers[-1]["dropped"].values()) > 0
