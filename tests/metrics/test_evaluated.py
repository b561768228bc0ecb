"""Evaluations as a run's journal keeps them, and as the panel, the curve and the report page show them."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from rookery.metrics import draw
from rookery.metrics.evaluated import Evaluated
from rookery.metrics.plot import plot_runs, read_curve
from rookery.metrics.report import write_report


def evaluation(steps, mean, **more):
    found = {"kind": "eval", "env_steps": steps, "wall_s": 9.0, "return_mean": mean, "return_std": 1.0, "episodes": 5}
    return found | more


def train(steps, wall, mean):
    return {"kind": "train", "env_steps": steps, "wall_s": wall, "return_mean": mean}


@pytest.fixture
def folder(tmp_path):
    """The evaluations of steps 10 and 20 came when training was further on, and 20 was taken again."""
    lines = [train(10, 1.0, 3.0), train(20, 2.0, 4.0), evaluation(10, 5.0), train(30, 3.0, 5.0)]
    lines += [evaluation(20, 99.0), evaluation(20, 8.0), train(40, 4.0, 6.0), evaluation(30, 7.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (tmp_path / "config.json").write_text(
        '{"recipe": "ppo", "env": "Mine", "eval": {"stop": true}, "target_return": 9}'
    )
    return tmp_path


@pytest.mark.parametrize("mean", [pytest.param(10**400, id="digits"), 1e200, float("nan"), "7", None])
def test_what_no_evaluation_has_is_left_out(mean):
    book = Evaluated()
    book.restore([evaluation(10, mean), evaluation(20, 3.0)])
    assert book.done == 1 and book.best["return_mean"] == 3.0


def test_of_equals_the_newest_is_the_best():
    book = Evaluated()
    for steps, mean in ((10, 5.0), (20, 7.0), (30, 7.0), (40, 6.0)):
        book.add(evaluation(steps, mean))
    assert (book.best["env_steps"], book.last["env_steps"], book.done) == (30, 40, 4)
    assert book.curve == [(10, 5.0), (20, 7.0), (30, 7.0), (40, 6.0)]


@pytest.mark.parametrize(
    "damage",
    [{"env_steps": "many"}, {"env_steps": -1}, {"env_steps": True}, {"return_mean": None}, {"return_mean": 1e300}],
)
def test_what_a_damaged_file_says_is_left_out(damage):
    book = Evaluated()
    book.restore([evaluation(10, 5.0), evaluation(20, 7.0) | damage, {}])
    assert book.done == 1 and book.best["env_steps"] == 10


def test_the_curve_has_the_steps_of_the_weights_and_the_time_they_were_as_they_are(folder):
    curve = read_curve(folder)
    assert curve.evaluated.tolist() == [[10, 20, 30], [1.0, 2.0, 3.0], [5.0, 8.0, 7.0]]
    assert curve.env_steps.tolist() == [10, 20, 30, 40]
    assert plot_runs([folder], folder / "curve.png").stat().st_size > 1000


def test_the_page_draws_the_curve_and_names_the_best_and_the_last(folder):
    page = write_report([folder]).read_text()
    assert "mean return of whole episodes" in page and "target 9" in page
    assert "20 steps: <b>8</b>" in page and "best in training" in page
    assert "30 steps: <b>7</b>" in page and "last in training" in page and "10 steps: <b>5</b>" not in page


def test_the_panel_shows_the_last_the_best_and_the_target_where_it_belongs():
    book = Evaluated()
    book.restore([evaluation(10_000, 500.0), evaluation(20_000, 480.0)])
    snapshot = {"evaluation": book.shown(), "return_mean": 30.0, "target_return": 490.0, "target_of": "return"}
    assert "evaluated 480 at 20,000" in draw.plain_line(snapshot)
    console = Console(width=100, force_terminal=True, color_system=None)

    def row(label, snapshot):
        with console.capture() as capture:
            console.print(draw.render(snapshot, 100))
        return next(line for line in capture.get().splitlines() if label in line)

    assert "480 at 20k, best 500" in row("evaluated", snapshot) and "target 490" in row("return", snapshot)
    snapshot["target_of"] = "evaluation"
    assert "480 at 20k   target 490" in row("evaluated", snapshot) and "target" not in row("return", snapshot)
    assert "evaluated" not in draw.plain_line({"evaluation": Evaluated().shown()})
