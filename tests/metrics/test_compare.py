"""Runs compared: seeds of one setting are one sample, and what makes a comparison doubtful is said."""

import json
import math

import numpy as np
import pytest

from rookery.core.errors import UsageError
from rookery.metrics.compare import as_numbers, compare
from rookery.metrics.statistic import bootstrap, iqm


def make_run(folder, final=100.0, points=21, **config):
    folder.mkdir(parents=True)
    config = {"recipe": "ppo", "env": "CartPole-v1", "seed": 1, "target_return": None, "algo": {"lr": 1e-3}} | config
    (folder / "config.json").write_text(json.dumps(config))
    records = [
        {"kind": "train", "env_steps": 100 * i, "wall_s": float(i), "return_mean": final * i / (points - 1)}
        for i in range(points)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def seeds(path, finals, **config):
    return [make_run(path / f"s{i}", final, seed=i, **config) for i, final in enumerate(finals)]


FINALS = [90.0, 100.0, 110.0, 120.0, 200.0]


def test_seeds_are_one_sample_and_settings_are_rows(tmp_path):
    runs = seeds(tmp_path / "a", FINALS) + seeds(tmp_path / "b", [50.0] * 5, algo={"lr": 1e-4})
    first, second = compare(runs)
    assert (first.label, first.runs, second.label, second.runs) == ("ppo, lr=0.001", 5, "ppo, lr=0.0001", 5)
    assert first.final == bootstrap([FINALS]) and first.final.value == pytest.approx(110.0)
    assert first.note == second.note == "" and first.steps is None and first.evaluation is None


def test_steps_to_a_return_count_the_runs_that_reached_it(tmp_path):
    (row,) = compare(seeds(tmp_path, FINALS), target=100.0)
    steps = [math.inf, 2000, 1900, 1700, 1000]  # the first record at 100 or more
    assert row.steps.value == iqm(steps) and row.reached == 4 and row.target == 100.0
    (row,) = compare(seeds(tmp_path / "own", FINALS, target_return=150.0))
    assert row.target == 150.0 and row.reached == 1 and row.steps.value == math.inf


def test_evaluations_count_where_every_run_has_one(tmp_path):
    runs = seeds(tmp_path, FINALS)
    for i, run in enumerate(runs):
        (run / "eval").mkdir()
        for steps, episodes, mean in ((100, 50, -1.0), (2000, 5, -2.0), (2000, 20, 300.0 + i)):
            result = {"env_steps": steps, "episodes": episodes, "return_mean": mean}
            (run / "eval" / f"{steps}-{episodes}.json").write_text(json.dumps(result))
    (row,) = compare(runs)
    assert row.evaluation.value == 302.0
    for file in (runs[0] / "eval").iterdir():
        file.write_text("damaged")
    assert compare(runs)[0].evaluation is None
    for last, known in (("damaged", False), ({"env_steps": 2000, "episodes": 4, "return_mean": 302.0}, True)):
        (runs[0] / "summary.json").write_text(json.dumps({"evaluation": {"last": last}}))  # its own, during training
        estimate = compare(runs)[0].evaluation
        assert estimate.value == iqm([302.0, 301.0, 302.0, 303.0, 304.0]) if known else estimate is None


@pytest.mark.parametrize(
    "finals, more, told",
    [([1.0], {}, "one run"), ([1.0, 2.0, 3.0], {}, "3 runs are few"), ([1.0] * 5, {"seed": 4}, "the same seed")],
)
def test_what_makes_a_comparison_doubtful_is_said(tmp_path, finals, more, told):
    runs = [make_run(tmp_path / str(i), final, **({"seed": i} | more)) for i, final in enumerate(finals)]
    assert told in compare(runs)[0].note


def test_runs_of_different_length_are_told(tmp_path):
    runs = [make_run(tmp_path / str(i), seed=i, points=11 if i else 21) for i in range(5)]
    assert "different length, 1,000 to 2,000 steps" in compare(runs)[0].note


def test_environments_are_joined_only_on_a_scale(tmp_path):
    cart, pole = [90.0, 100.0, 110.0, 120.0, 130.0], [-20.0, -10.0, 0.0, 10.0, 20.0]
    runs = seeds(tmp_path / "a", cart) + seeds(tmp_path / "b", pole, env="Pong")
    assert len(compare(runs)) == 2
    row = compare(runs, scores={"CartPole-v1": (0, 200), "Pong": (-20, 20)})[-1]
    scaled = [list(np.array(cart) / 200), [0.0, 0.25, 0.5, 0.75, 1.0]]
    assert row.runs == 10 and row.label == "ppo, 2 environments" and row.final == bootstrap(scaled)
    with pytest.raises(UsageError, match="must be lower"):
        compare(runs, scores={"Pong": (1, 1)})


def test_a_row_becomes_json_without_nan(tmp_path):
    (row,) = compare([make_run(tmp_path / "one")], target=1e6)
    text = json.dumps(as_numbers(row), allow_nan=False)
    assert json.loads(text)["final"] == {"iqm": 100.0, "low": None, "high": None}
    assert json.loads(text)["steps_to_target"]["iqm"] is None and json.loads(text)["reached"] == 0


def test_nothing_to_compare_is_told(tmp_path):
    with pytest.raises(UsageError, match="which runs"):
        compare([])
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="nothing to compare"):
        compare([run])
