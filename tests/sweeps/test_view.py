"""What a sweep shows while it runs, from the records of its runs; and its table at the end."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from rookery.run.configured import configure
from rookery.sweeps.plan import Plan
from rookery.sweeps.result import Sweep, SweepRun, cells, final_value, outcomes, train_command
from rookery.sweeps.view import Lines, board, duration


def run_of(tmp_path, name, seed, state="done", final=10.0, **values):
    path = tmp_path / name
    path.mkdir()
    config = {"recipe": "ppo", "env": "CartPole-v1", "seed": seed, "target_return": 15.0, **values}
    (path / "config.json").write_text(json.dumps(config))
    record = {"kind": "train", "env_steps": 250, "wall_s": 2.0, "return_mean": final, "steps_per_s": 125.0}
    (path / "metrics.jsonl").write_text(json.dumps(record) + "\n" + '{"kind": "train", "env_')
    return SweepRun(name, path, name.rpartition("-seed")[0], values, seed, 1000, state, summary={"return_mean": final})


def drawn(table, width) -> str:
    console = Console(file=io.StringIO(), width=width, height=40)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_board_shows_steps_return_and_time_left_in_any_width(tmp_path, width):
    runs = [run_of(tmp_path, "base-seed-1", 1, "running"), run_of(tmp_path, "base-seed-2", 2, "failed")]
    text = drawn(board(runs, 4, 10), width)
    assert all(len(line) <= width for line in text.splitlines())
    flat = " ".join(text.split())
    for words in ("0 of 4 runs done", "1 running", "1 failed", "25%", "0:06"):
        assert words in flat, text
    # 750 steps of the one that runs, and 1,000 of each of the two that are not known yet
    assert "about 0:22 left" in flat


def test_a_board_without_room_says_how_many_are_left_out(tmp_path):
    runs = [run_of(tmp_path, f"base-seed-{seed}", seed) for seed in range(6)]
    assert "… and 3 more" in drawn(board(runs, 6, 3), 80)


def test_lines_tell_each_change_once(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    lines, runs = Lines(console), [run_of(tmp_path, "base-seed-1", 1, "running")]
    lines.update(runs, 1)
    lines.update(runs, 1)
    runs[0].state = "done"
    lines.update(runs, 1)
    said = console.file.getvalue().splitlines()
    assert said == [
        "base-seed-1: running, return 10 (0 of 1 runs have ended)",
        "base-seed-1: done, return 10 (1 of 1 runs have ended)",
    ]


def test_durations():
    assert [duration(seconds) for seconds in (5, 65, 3700, math.nan)] == ["0:05", "1:05", "1:01:40", ""]


def test_the_table_has_the_best_first_and_a_row_without_a_result_last(tmp_path):
    base = configure("ppo", "CartPole-v1", net={"hidden": (32, 32)}, target_return=15.0)
    plan = Plan(base, {"algo.lr": [0.1, 0.2, 0.3]}, seeds=(1, 2))
    settings = list(plan.settings())
    runs = [
        run_of(tmp_path, f"{each.name}-seed-{seed}", seed, "failed" if place == 1 else "done", 10.0 * place + seed)
        for place, each in enumerate(settings) for seed in (1, 2)
    ]  # fmt: skip
    table = outcomes(plan, settings, runs)
    assert [each.values["algo.lr"] for each in table] == [0.3, 0.1, 0.2]
    assert cells(Sweep(tmp_path, plan, runs, table)) == [
        ["lr", "runs", "return", "steps to target"],
        ["0.3", "2", "21.5 (21 to 22)", "250 (250 to 250)"],
        ["0.1", "2", "1.5 (1 to 2)", "not reached; 0 of 2 reached"],
        ["0.2", "0 of 2", "–", "–"],
    ]
    assert (table[0].config.algo.lr, table[0].config.seed, table[0].config.out) == (0.3, 1, "")
    plain = configure("ppo", "CartPole-v1")
    assert train_command("ppo", table[0], plain) == (
        "rookery train ppo --env CartPole-v1 --algo.lr 0.3 --net.hidden 32 32 --target-return 15.0"
    )


def test_an_evaluation_counts_before_the_returns_of_training(tmp_path):
    run = run_of(tmp_path, "base-seed-1", 1)
    assert final_value(run.path) == 10.0
    (run.path / "eval").mkdir()
    (run.path / "eval" / "a.json").write_text(json.dumps({"env_steps": 250, "episodes": 5, "return_mean": 99.0}))
    assert final_value(run.path) == 99.0
