"""Environments that fail are recreated alone, in every topology: the same bits, and a ledger of what was lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support_pixels import Pixels

import rookery
from rookery.core.errors import EnvError
from rookery.core.seeding import seed_of
from rookery.metrics.sink import read_records
from rookery.storage import checkpoint

REPLAY = {"min_size": 60, "batch": 16, "capacity": 300, "samples_per_insert": 2.0}
SELDOM = {"samples_per_insert": 0.2}
PPO = {"unroll": 16, "chunk": 8, "epochs": 1, "minibatches": 2}
R2D2 = {"sequence": 8, "burn_in": 4, "overlap": 4, "unroll": 6, "replay": REPLAY | {"min_size": 10, "batch": 4}}
SEED, LANES = 3, 3
EPISODES = {"lengths": [5, 9, 30]}  # steps


def victim(lane: int) -> int:
    """The seed with which a run starts the environment of that lane."""
    return seed_of(SEED, "env", lane, "0.0") % 2**31


def train(folder: Path, recipe: str, topology: str, algo: dict, actors: int = 1, **fields) -> rookery.Run:
    faults = {"at_episode": 1, "at_step": 3, "seed": victim(actors * LANES - 2), **EPISODES} | fields.pop("fault", {})
    settings = {"env": "rookery/Faulty-v0", "env_kwargs": faults, "preset": "vector"} | fields
    return rookery.train(
        recipe, out=str(folder), topology=topology, algo=algo, actors=actors, envs_per_actor=LANES, env_steps=400,
        quiet=True, seed=SEED, log_every=0, **settings,
    )  # fmt: skip


def records(run: rookery.Run, kind: str) -> list[dict]:
    return [record for record in read_records(run.path / "metrics.jsonl") if record["kind"] == kind]


@pytest.mark.parametrize(
    ("recipe", "algo", "actors", "fault", "net", "reason"),
    [("ppo", PPO, 2, "nan_obs", {"core": "gru"}, "nonfinite"), ("r2d2", R2D2, 1, "raise_step", {}, "env_raised")],
)
def test_serial_and_local_lose_the_same_and_end_with_the_same_bits(tmp_path, recipe, algo, actors, fault, net, reason):
    runs = []
    for topology in ("serial", "local"):
        run = train(tmp_path / topology, recipe, topology, algo, actors, fault={"fault": fault}, net=net)
        (said,) = (record["text"] for record in records(run, "message"))
        assert f"actor {actors - 1}, lane {actors * LANES - 2}, episode 1, step 3" in said and "recreated" in said
        for number, record in enumerate(records(run, "train")):
            ledger = record["ledger"]
            gone = ledger["trained"] + ledger["evicted"] + sum(ledger["dropped"].values()) + ledger["in_flight"]
            assert ledger["collected"] == gone, (number, ledger)
        runs.append(run)
    one, other = (checkpoint.newest(run.path / "checkpoints")[0].tensors for run in runs)
    assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    first, second = (run.summary for run in runs)
    for name in ("ledger", "env_steps", "episodes", "return_mean", "updates", "restarts"):
        assert first[name] == second[name], name
    lost = first["ledger"]["dropped"]
    assert first["restarts"] == 1 and lost.pop("cut", 0) <= LANES * R2D2["burn_in"]
    assert set(lost) == {reason} and lost[reason] <= LANES * (algo["unroll"] + R2D2["sequence"])


class Fragile(Pixels):
    """Breaks once, in the third environment that is made."""

    made = 0

    def __init__(self):
        super().__init__()
        type(self).made += 1
        self.breaks = type(self).made == 3

    def step(self, action):
        if self.breaks and self.step_number == 7:
            raise RuntimeError("broken")
        return super().step(action)


def fragile() -> Fragile:
    return Fragile()


def test_frames_of_a_memory_go_on_behind_a_gap(tmp_path):
    """The lanes of the actor number their frames on; those of the row behind the gap are new."""
    Fragile.made = 0
    run = train(
        tmp_path / "run", "dqn", "serial", {"replay": REPLAY | SELDOM, "n_step": 3}, env="test_mending:fragile",
        env_kwargs={}, preset="pixels", net={"torso": "tiny", "features": 16},
    )  # fmt: skip
    assert run.summary["restarts"] == 1 and Fragile.made == LANES + 1
    assert set(run.summary["ledger"]["dropped"]) == {"env_raised"}


def test_a_fault_without_end_ends_the_run_by_its_own_words(tmp_path):
    """It strikes in the first step of every environment, so no unroll is ever whole."""
    with pytest.raises(EnvError, match=r"raise_step in episode 0, step 0"):
        train(
            tmp_path / "run", "ppo", "serial", PPO, supervisor={"restarts": 2},
            fault={"at_episode": 0, "at_step": 0, "seed": None},
        )  # fmt: skip
    said = [r["text"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "message"]
    assert len(said) == 2 and all("recreated in" in text and "2 more lanes failed" in text for text in said)
