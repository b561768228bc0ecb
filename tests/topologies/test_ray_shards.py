"""A replay memory in parts on a Ray cluster: recipes train from it, parts die, checkpoints hold all of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support_ray import SMALL, Run, cluster_of, kill, ledger_balances, messages, until
from support_services import SLOW, trains

import rookery
from rookery.core.errors import LearnerError, UsageError
from rookery.crews.ray_service import RayService
from rookery.storage import replay_file
from rookery.tables.shards import ShardedReplay

REPLAY = {"min_size": 100, "batch": 16, "capacity": 4000, "samples_per_insert": 4.0, "slack": 64.0, "shards": 2}
APEX = {"algo": {"unroll": 5, "replay": REPLAY}}
R2D2 = {"sequence": 8, "burn_in": 4, "overlap": 4, "unroll": 6, "target_period": 10}
SETTINGS: dict[str, dict[str, Any]] = {
    "apex_dqn": APEX,
    "r2d2": {"algo": R2D2 | {"replay": REPLAY | {"min_size": 10, "batch": 4, "capacity": 500}}},
}
LIGHT = {"ray": {"cpus_per_shard": 0.5}, "net": {"hidden": (8,)}}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    with cluster_of(3) as cluster:
        yield cluster


@pytest.fixture
def shards(monkeypatch) -> list[dict[str, Any]]:
    """What every shard says of itself, in the order in which they start."""
    seen: list[dict[str, Any]] = []
    placed = RayService._placed

    def watched(shard: RayService, about: Any) -> None:
        placed(shard, about)
        seen.append(shard.where | {"index": shard.wanted.setup["index"]})

    monkeypatch.setattr(RayService, "_placed", watched)
    return seen


def settings_of(recipe: str, **fields: Any) -> dict[str, Any]:
    return SMALL | {"env": "CartPole-v1", "env_steps": 1200} | LIGHT | SETTINGS[recipe] | fields


def train(recipe: str, folder: Path, **fields: Any) -> rookery.Run:
    return rookery.train(recipe, out=str(folder), **settings_of(recipe, **fields))


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """What was seen of the run `whole`."""
    return {"shards": [], "tables": [], "inserted": []}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, made) -> rookery.Run:
    """A run of Ape-X that was saved, and watched."""
    placed, init, insert = RayService._placed, ShardedReplay.__init__, ShardedReplay.insert

    def seen(name: str, result: Any, each: Any) -> Any:
        made[name].append(each)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            RayService,
            "_placed",
            lambda shard, about: seen("shards", placed(shard, about), shard.wanted.setup["index"]),
        )
        patch.setattr(ShardedReplay, "__init__", lambda table, *args: seen("tables", init(table, *args), table))
        patch.setattr(ShardedReplay, "insert", lambda table, each: seen("inserted", insert(table, each), each))
        return train("apex_dqn", tmp_path_factory.mktemp("saved") / "run")


def test_a_recipe_trains_from_a_memory_in_parts(whole, made):
    check_run(whole, made["shards"], "apex_dqn")


@pytest.mark.attack  # the same shards, with sequences: on one machine test_replay_topologies.py has them
def test_sequences_in_parts(tmp_path, shards):
    check_run(train("r2d2", tmp_path / "run"), [shard["index"] for shard in shards], "r2d2")


def check_run(run: rookery.Run, indices: list[int], recipe: str) -> None:
    replay, ledger = run.summary["replay"], run.summary["ledger"]
    assert run.exit_code == 0 and ledger_balances(run.summary), ledger
    assert run.summary["updates"] > 20 and ledger["trained"] > 300 and ledger["dropped"] == {}
    assert sorted(indices) == [0, 1] and replay["shards"] == 2
    wanted = REPLAY["samples_per_insert"] * (replay["inserted"] - SETTINGS[recipe]["algo"]["replay"]["min_size"])
    assert abs(replay["sampled"] - wanted) <= 64 + 8 * 16, "the ratio holds over both"


def test_actors_hand_their_items_to_a_shard_each_and_the_learners_process_does_not_hold_them(whole, made):
    assert made["tables"][0].front.homes.tolist() == [0, 1]
    assert made["inserted"] and all(delivery.reference is not None for delivery in made["inserted"])
    assert set().union(*(delivery.arrays for delivery in made["inserted"])) == {"count", "steps", "version"}


def test_a_killed_shard_is_replaced_and_its_items_are_counted(tmp_path, shards):
    folder = tmp_path / "run"
    run = Run("apex_dqn", folder, **settings_of("apex_dqn", **SLOW, env_steps=10**6))
    until(lambda: run.running() and trains(folder), "updates")
    kill(shards[0]["pid"])
    until(lambda: run.running() and any("shard" in text for text in messages(folder)), "the news", seconds=5.0)
    until(lambda: run.running() and len(shards) == 3, "another one")
    assert shards[2]["index"] == shards[0]["index"] and shards[2]["pid"] != shards[0]["pid"]
    run.end()
    done = run.result()
    ledger = done.summary["ledger"]
    assert done.exit_code == 75 and ledger_balances(done.summary), ledger
    assert done.summary["restarts"] == 1 and done.summary["replay"]["shards_lost"] == 1
    assert set(ledger["dropped"]) <= {"shard"}
    (text,) = messages(tmp_path / "run")
    assert f"shard {shards[0]['index']} of the replay memory is gone" in text and "its items are lost" in text


@pytest.mark.attack  # the shard that is killed and test_ray_faults.py's lost node take the same two ways
def test_a_node_with_a_shard_is_lost_and_training_goes_on(tmp_path, cluster, shards):
    node = cluster.add_node(num_cpus=2, resources={"other": 1})
    cluster.wait_for_nodes()
    # The shards want more than the first node has, so that one of them is elsewhere.
    fields = SLOW | {"ray": {"cpus_per_shard": 1.5, "cpus_per_actor": 0.5}, "env_steps": 5000}
    run = Run("apex_dqn", tmp_path / "run", **settings_of("apex_dqn", **fields))
    until(lambda: run.running() and trains(tmp_path / "run"), "updates")
    away = [shard for shard in shards if shard["id"] == node.node_id]
    assert len({shard["id"] for shard in shards}) == 2
    cluster.remove_node(node, allow_graceful=False)
    done = run.result()
    assert done.exit_code == 0 and ledger_balances(done.summary), done.summary["ledger"]
    assert done.summary["replay"]["shards_lost"] == len(away)


def test_a_shard_that_dies_again_and_again_ends_the_run(tmp_path, monkeypatch):
    look = RayService.look

    def dies(shard: RayService) -> None:
        look(shard)
        if shard.wanted.setup["index"] == 1 and shard.up:
            shard.kill("for the test")

    monkeypatch.setattr(RayService, "look", dies)
    with pytest.raises(LearnerError, match="shard 1 of the replay memory"):
        train("apex_dqn", tmp_path / "run", **SLOW, supervisor={"restarts": 1}, env_steps=10**6)


def copied(saved: rookery.Run, folder: Path) -> rookery.Run:
    shutil.copytree(saved.path, folder)
    return replace(saved, path=folder)


def test_a_memory_in_parts_is_saved_and_found_again(tmp_path, monkeypatch, whole):
    saved = copied(whole, tmp_path / "run")
    step = saved.summary["env_steps"]
    for index in range(2):
        assert replay_file.find(saved.path / "replay" / f"shard-{index}", step).name.endswith(str(step))
    sizes: list[int] = []
    hear = ShardedReplay.hear
    monkeypatch.setattr(ShardedReplay, "hear", lambda table: (hear(table), sizes.append(len(table)))[0])
    resumed = rookery.resume(saved.path, env_steps=2400)
    assert next(filter(None, sizes)) == saved.summary["replay"]["size"], "all items are there before the first update"
    assert resumed.summary["replay"]["size"] > saved.summary["replay"]["size"]
    assert ledger_balances(resumed.summary) and resumed.summary["ledger"]["dropped"].get("shard", 0) == 0
    assert not any("replay memory" in text for text in messages(saved.path))


def test_a_part_that_was_not_saved_starts_empty_and_that_is_said(tmp_path, whole):
    saved = copied(whole, tmp_path / "run")
    (folder,) = (saved.path / "replay" / "shard-1").iterdir()
    folder.rename(tmp_path / "elsewhere")
    resumed = rookery.resume(saved.path, env_steps=1800)
    assert "1 of 2 parts of the replay memory were not saved: they start empty" in messages(saved.path)
    assert ledger_balances(resumed.summary)


def test_what_shards_cannot_do_is_refused(tmp_path):
    with pytest.raises(UsageError, match="ray_cluster"):
        train("apex_dqn", tmp_path / "a", topology="local", actors=1)
    with pytest.raises(UsageError, match="shards is 2"):
        rookery.train("gorila", **settings_of("apex_dqn", out=str(tmp_path / "b"), algo={"replay": REPLAY}, actors=1))
    with pytest.raises(UsageError, match="proportional"):
        train("apex_dqn", tmp_path / "c", algo={"replay": REPLAY | {"sampler": "rank"}})
    with pytest.raises(UsageError, match="CPUs"):
        train("apex_dqn", tmp_path / "d", ray={"cpus_per_shard": 50.0})
