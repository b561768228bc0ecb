"""Within metrics.jsonl, steps and time never go back, however often a run is started again."""

import json
import shutil

import pytest

import rookery
from rookery.metrics.rewind import rewind
from rookery.metrics.sink import read_records


def line(steps, wall, **more):
    return json.dumps({"kind": "train", "env_steps": steps, "wall_s": wall} | more) + "\n"


def written(folder, *lines):
    (folder / "metrics.jsonl").write_text("".join(lines))


def steps_of(folder, name="metrics.jsonl"):
    return [record["env_steps"] for record in read_records(folder / name)]


def test_records_behind_the_checkpoint_move_to_a_file_of_their_own(tmp_path):
    written(tmp_path, line(0, 0.0), line(10, 1.0), line(20, 2.0), line(20, 2.5), line(30, 3.0), line(40, 4.0))
    assert rewind(tmp_path, 20)[:3] == (2, "metrics-1.jsonl", 2.5)
    assert steps_of(tmp_path) == [0, 10, 20, 20] and steps_of(tmp_path, "metrics-1.jsonl") == [30, 40]
    assert rewind(tmp_path, 20)[:3] == (0, "", 2.5)
    assert rewind(tmp_path, -1)[:3] == (4, "metrics-2.jsonl", 0.0)
    assert steps_of(tmp_path) == [] and steps_of(tmp_path, "metrics-2.jsonl") == [0, 10, 20, 20]


def test_lines_that_are_no_records_stay_where_they_are(tmp_path):
    written(tmp_path, line(10, 1.0), "not json\n", '["a list"]\n', line(20, 2.0), '{"env_steps": 30, "wa')
    assert rewind(tmp_path, 10)[:2] == (1, "metrics-1.jsonl")
    assert (tmp_path / "metrics.jsonl").read_text() == line(10, 1.0) + "not json\n" + '["a list"]\n'


def test_a_time_that_nothing_can_be_added_to_is_none(tmp_path):
    written(tmp_path, line(10, 10**400), line(20, 2.0))
    assert rewind(tmp_path, 20).wall_s == 2.0


def test_an_evaluation_stays_if_its_weights_are_not_behind_the_checkpoint(tmp_path):
    """It was recorded when training was further on."""
    early, late = line(20, 3.5, kind="eval", return_mean=7.0), line(30, 3.6, kind="eval", return_mean=9.0)
    written(tmp_path, line(10, 1.0), line(20, 2.0), line(30, 3.0), early, late, line(40, 4.0))
    moved, where, wall_s, evaluations = rewind(tmp_path, 20)
    assert (moved, wall_s, [each["return_mean"] for each in evaluations]) == (3, 3.5, [7.0])
    assert (tmp_path / "metrics.jsonl").read_text() == line(10, 1.0) + line(20, 2.0) + early
    assert (tmp_path / where).read_text() == line(30, 3.0) + late + line(40, 4.0)
    assert rewind(tmp_path, 20) == (0, "", 3.5, evaluations)


def test_without_records_there_is_nothing_to_do(tmp_path):
    assert rewind(tmp_path, 5) == (0, "", 0.0, [])


@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_starts_again_has_one_line_of_time(tmp_path, first):
    """Killed before its first checkpoint, or behind one."""
    out = tmp_path / "run"
    fields = {"topology": "serial", "quiet": True, "log_every": 0.0, "checkpoint": {"every": 1024, "keep": 9}}
    rookery.train("ppo", env="CartPole-v1", preset="cartpole", env_steps=3000, out=str(out), **fields)
    before = steps_of(out)
    (out / "summary.json").unlink()
    for each in sorted((out / "checkpoints").glob("step-*"))[0 if first else 1 :]:
        shutil.rmtree(each)
    rookery.resume(out, env_steps=4000)
    records = read_records(out / "metrics.jsonl")
    for name in ("env_steps", "wall_s"):
        column = [record[name] for record in records]
        assert column == sorted(column), (name, column)
    moved = steps_of(out, "metrics-1.jsonl")
    assert moved and moved == before[-len(moved) :] and records[-1]["env_steps"] >= 4000
    assert any("are in metrics-1.jsonl now" in record.get("text", "") for record in records)
