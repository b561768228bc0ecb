"""check-env, doctor and bench."""

import json
from types import SimpleNamespace

import pytest

from rookery.cli import doctor
from rookery.cli.main import main
from rookery.core.errors import EnvError, UsageError
from rookery.recipes import RECIPES

ZOO = """
import gymnasium
import numpy as np

class Snake(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict({"[red]:snake:": gymnasium.spaces.Box(-1, 1, (1,), np.float32)})
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return {"[red]:snake:": np.zeros(1, np.float32)}, {}

    def step(self, action):
        self.t += 1
        return {"[red]:snake:": np.zeros(1, np.float32)}, 1.0, self.t == 5, False, {}

def snake(render_mode=None):
    return Snake()
"""


def test_check_env_reports_a_good_environment(capsys):
    assert main(["check-env", "CartPole-v1", "--steps", "200"]) == 0
    text = capsys.readouterr().out
    assert "CartPole-v1: ready to train on" in text and "vector (4,) float32" in text


def test_no_spinner_turns_in_a_file(capsys, monkeypatch):
    """FORCE_COLOR is set by notebooks for the programs that they start."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["check-env", "CartPole-v1", "--steps", "40"]) == 0
    assert "\033" not in capsys.readouterr().out


def test_check_env_as_json_is_the_report_and_nothing_else(capfd):
    words = ["--steps", "200", "--env-kwargs", '{"max_episode_steps": 5}', "--json"]
    assert main(["check-env", "CartPole-v1", *words]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["ok"] and report["mean_length"] == 5


def test_check_env_of_a_broken_environment_is_exit_code_3(own_env, capsys):
    assert main(["check-env", f"{own_env}:broken"]) == EnvError.exit_code
    text = capsys.readouterr().out
    assert "not usable yet" in text and "RuntimeError: the wheel [came off]" in text


def test_an_id_is_shown_as_it_is_and_not_as_a_picture(tmp_path, monkeypatch, capsys):
    """Rich would make an emoji of `:snake:`, and a style of `[red]`."""
    (tmp_path / "zoo.py").write_text(ZOO)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check-env", "zoo:snake:", "--steps", "40"]) == UsageError.exit_code
    assert "zoo:snake:" in capsys.readouterr().err
    assert main(["check-env", "zoo:snake", "--steps", "40"]) == 0
    text = capsys.readouterr().out
    assert "zoo:snake: ready to train on" in text and "🐍" not in text
    assert "observation [red]:snake: vector (1,)" in " ".join(text.split())


def test_recipes_are_one_line_each_and_one_by_name_has_its_presets(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(RECIPES)]] == list(RECIPES) and len(lines) == len(RECIPES) + 1
    assert main(["recipes", "ppo"]) == 0
    assert "CartPole-v1" in capsys.readouterr().out


def test_check_env_of_an_unknown_environment_is_exit_code_2(capsys):
    assert main(["check-env", "CartPoel-v1"]) == UsageError.exit_code
    assert "CartPole-v1" in capsys.readouterr().err


def test_doctor_names_what_is_missing_and_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setitem(doctor.EXTRAS, "dreams", (("no_such_module_at_all",), "sleep"))
    assert main(["doctor", "--no-speed"]) == 0
    text = capsys.readouterr().out
    assert "pip install 'rookery[dreams]'" in text and "memfd" in text and "torch" in text


def test_doctor_makes_an_environment_of_every_extra_that_is_installed(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "EXTRAS", {"box2d": (("json",), "landers"), "dmc": (("json",), "walkers")})
    monkeypatch.setattr(doctor, "ENVS", {"box2d": "CartPole-v1", "dmc": "rookery/Faulty-v0"})
    real = doctor.probe

    def broken(env, kwargs, deadline):
        return real(env, {"fault": "raise_init"} if "Faulty" in env else kwargs, deadline)

    monkeypatch.setattr(doctor, "probe", broken)
    assert main(["doctor", "--no-speed"]) == 1
    text = capsys.readouterr().out
    assert "installed (landers), CartPole-v1 can be made" in text
    assert "installed, but rookery/Faulty-v0 cannot be made: " in text and "scripted fault" in text
    assert "needs attention: dmc" in text


def test_doctor_trains_for_a_moment(capsys):
    assert main(["doctor", "--json"]) == 0
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["self-test"]["state"] == "ok" and "steps/s" in findings["self-test"]["value"]


def test_doctor_ends_with_1_when_something_needed_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_memfd", lambda: doctor.Finding("memfd", "no", "problem", "a newer kernel"))
    assert main(["doctor", "--no-speed"]) == 1
    assert "needs attention: memfd" in capsys.readouterr().out


@pytest.fixture
def trained(monkeypatch):
    """The configs that bench asks to train, without training them."""
    configs = []

    def train(config):
        configs.append(config)
        summary = {
            "env_steps": config.env_steps, "wall_s": 2.0, "steps_per_s": 1000.0 * config.actors,
            "acting_steps_per_s": 4000.0 * config.actors, "time_split": {"wait": 0.25},
        }  # fmt: skip
        return SimpleNamespace(exit_code=0, summary=summary, path=config.out)

    monkeypatch.setattr("rookery.run.run.train", train)
    return configs


def test_bench_varies_the_actors_and_keeps_the_batch(trained, tmp_path, capsys):
    words = ["--env", "CartPole-v1", "--actors", "1", "2", "4", "--env-steps", "2k", "--core", "gru"]
    assert main(["bench", "scaling", *words, "--out", str(tmp_path / "b")]) == 0
    assert [(config.actors, config.lanes) for config in trained] == [(1, 8), (2, 8), (4, 8)]
    assert {config.topology for config in trained} == {"local"}
    assert {(config.env_steps, config.net.core) for config in trained} == {(2000, "gru")}
    text = capsys.readouterr().out
    assert "4.00×" in text and "25%" in text
    rows = json.loads((tmp_path / "b" / "scaling.json").read_text())
    assert [row["steps_per_s"] for row in rows] == [1000, 2000, 4000]
    assert (tmp_path / "b" / "scaling.png").stat().st_size > 1000


def test_bench_rounds_the_presets_environments_up_so_that_all_share_evenly(trained, tmp_path):
    assert main(["bench", "scaling", "--env", "CartPole-v1", "--actors", "2", "3", "--out", str(tmp_path)]) == 0
    assert [config.lanes for config in trained] == [12, 12]


@pytest.mark.parametrize(
    "words, message",
    [
        ("--actors 2 3 --envs 8", "--envs 12 can"),
        ("--actors 0", "not a positive whole number"),
        ("--topology serial", "what bench scaling varies"),
        ("--envs-per-actor 3", "what bench scaling varies"),
        ("--actor 3", "did you mean --actors"),
        ("--envs", "needs a value"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(trained, words, message, capsys):
    assert main(["bench", "scaling", "--env", "CartPole-v1", *words.split()]) == UsageError.exit_code
    assert message in capsys.readouterr().err
    assert trained == []
