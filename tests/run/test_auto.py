"""Topology auto: what is decided, by which numbers, and that config.json names it."""

from __future__ import annotations

import json

import pytest
import support_cost

import rookery
from rookery.core.errors import EnvError, UsageError
from rookery.run import auto
from rookery.run.auto import decide, settled
from rookery.run.configured import asked
from rookery.run.finished import Run

SMALL = {"preset": "vector", "quiet": True, "net": {"hidden": (8,)}, "algo": {"unroll": 8}}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(auto, "_looked", {})
    monkeypatch.setattr(auto, "available_cores", lambda: 2)
    monkeypatch.setattr(auto, "actors_for", lambda lanes: 2 if lanes % 2 == 0 else 1)


@pytest.fixture
def eager(monkeypatch):
    """Processes for everything that may have them."""
    monkeypatch.setattr(auto, "HANDOVER", 0.0)
    monkeypatch.setattr(auto, "WORTH", 0.0)
    monkeypatch.setattr(auto, "SHORT", 1)


@pytest.fixture
def unasked(monkeypatch):
    def timed(*_):
        raise AssertionError("nothing is to be measured here")

    monkeypatch.setattr(auto, "timed", timed)


def of(env, recipe="ppo", **fields):
    return settled(rookery.configure(recipe, env, **({"env_steps": 100_000} | SMALL | fields)))


@pytest.mark.parametrize(
    "step_s, round_steps, env_steps, actors, processes",
    [
        (5e-6, 2_048, 10**8, 2, True),  # a long run
        (4e-6, 2_048, 10**8, 2, False),  # rounds that end before a process is woken
        (6.5e-5, 2_048, 100_000, 2, False),  # MuJoCo: over before the processes have started
        (6.5e-5, 2_048, 1_000_000, 2, True),
        (6.5e-5, 16, 1_000_000, 2, False),  # a few steps between two updates, as with replay
        (1e-3, 16, 1_000_000, 2, True),
        (0.05, 2_048, 10_000, 2, True),
        (1e-3, 2_048, 20_100, 2, True),
        (1e-3, 2_048, 19_900, 2, False),
        (1e-3, 2_048, 10_800, 16, True),  # more actors save more
    ],
)
def test_processes_are_for_long_rounds_and_long_runs(step_s, round_steps, env_steps, actors, processes):
    assert decide(step_s, round_steps, env_steps, actors) == processes


def test_an_expensive_environment_is_spread_and_a_cheap_one_is_not():
    config, why = of("support_cost:Slow")
    assert (config.topology, config.actors, config.envs_per_actor) == ("local", 2, 8)
    assert why.startswith("local, 2 actors × 8 environments: a step of the environment takes ") and "ms" in why
    config, why = of("support_cost:quick")
    assert (config.topology, config.actors, config.envs_per_actor) == ("serial", 1, 16) and why.startswith("serial: ")


def test_one_with_a_mask_in_info_is_played_legally():
    assert of("support_cost:MaskedSlow")[0].topology == "local"


def test_a_run_takes_what_was_chosen_records_it_and_does_not_measure_again(tmp_path, eager, monkeypatch):
    out = tmp_path / "run"
    run = rookery.train(
        "ppo", env="support_cost:quick", env_steps=128, out=str(out), supervisor={"spare": False}, **SMALL
    )
    stored = json.loads((out / "config.json").read_text())
    assert (stored["topology"], stored["actors"], stored["envs_per_actor"]) == ("local", 2, 8)
    assert run.summary["topology"] == "local" and run.summary["topology_why"].startswith("local, 2 actors")
    said = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (message,) = [each["text"] for each in said if each["kind"] == "message"]
    assert message == f"topology {run.summary['topology_why']}"

    def timed(*_):
        raise AssertionError("a run that is resumed has its topology")

    monkeypatch.setattr(auto, "timed", timed)
    monkeypatch.setattr("rookery.run.run._carry_out", lambda config, *_, **__: Run(out, config, {}))
    again = rookery.resume(out, trust=("support_cost",), env_steps=400).config
    assert (again.topology, again.actors, again.env_steps) == ("local", 2, 400)
    with pytest.raises(UsageError, match="topology auto is settled when a run starts"):
        rookery.resume(out, trust=("support_cost",), env_steps=600, topology="auto")


def test_environments_that_cannot_move_stay_here_without_a_word(eager, unasked):
    for env in (lambda: support_cost.quick(), "CartPole-v1", "rookery/Catch-v0", "ALE/Pong-v5"):
        preset = {"preset": "pixels"} if env in ("rookery/Catch-v0", "ALE/Pong-v5") else {}
        config, why = of(env, **preset)
        assert (config.topology, config.actors, why) == ("serial", 1, "")


@pytest.mark.parametrize(
    "recipe, fields, topology",
    [
        ("ppo", {"env_steps": 9_999}, "serial"),  # a trial
        ("ppo", {"envs_per_actor": 1}, "serial"),  # nothing to spread
        ("ppo", {"preset": "acrobot"}, "serial"),  # the row says so
        ("appo", {"topology": "auto"}, "local"),  # the recipe's own
        ("a3c", {}, "async_grads"),
        ("ppo", {"topology": "local"}, "local"),
        ("ppo", {"topology": "serial", "actors": 2}, "serial"),
    ],
)
def test_nothing_is_measured_where_there_is_nothing_to_choose(unasked, recipe, fields, topology):
    config, why = of("support_cost:quick", recipe, **fields)
    assert (config.topology, why) == (topology, "")


@pytest.mark.parametrize(
    "recipe, algo, topology",
    [
        ("dqn", {}, "local"),
        ("dqn", {"replay": {"slack": 100.0}}, "serial"),
        ("dqn", {"replay": {"samples_per_insert": 0.0}}, "serial"),
    ],
)
def test_only_what_learns_the_same_in_processes_is_moved(eager, recipe, algo, topology):
    """Actors that run ahead of a replay memory without an exact ratio are another algorithm."""
    config, _ = of("support_cost:quick", recipe, net={}, algo=algo)
    assert config.topology == topology


def test_one_that_raises_stays_here_and_one_that_ends_its_process_is_told():
    assert of("support_cost:Raising") == (of("support_cost:Raising", topology="serial")[0], "")
    with pytest.raises(EnvError, match=r"support_cost:Crashing ended its process \(exit 9\)"):
        of("support_cost:Crashing")


def test_of_a_config_too_several_actors_are_processes_and_several_ranks_a_group():
    config = rookery.configure("ppo", "CartPole-v1", **SMALL)
    assert config.topology == "auto"
    found = [asked(config, "", "", fields).topology for fields in ({}, {"actors": 2}, {"ranks": 2})]
    assert found == ["auto", "local", "allreduce"]
