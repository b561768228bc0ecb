"""What `import rookery` does with runs: given as runs, folders or policies; a stored run is not trusted by itself."""

import dataclasses
import sys

import gymnasium
import numpy as np
import pytest

import rookery
from rookery.cli.main import main
from rookery.core.errors import CheckpointError, EnvError, UsageError
from rookery.play import evaluate

TASK = """
import gymnasium

def make(limit=20, render_mode=None):
    return gymnasium.make("CartPole-v1", max_episode_steps=limit, render_mode=render_mode)
"""


def trained(out, env="CartPole-v1", **fields):
    return rookery.train("ppo", env=env, env_steps=256, quiet=True, out=str(out), envs_per_actor=2, **fields)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("interface") / "run")


def short(limit=7):
    return gymnasium.make("CartPole-v1", max_episode_steps=limit)


def test_a_run_its_folder_a_checkpoint_and_a_policy_play_the_same(run):
    policy = rookery.load(run)
    forms = (run, run.path, str(run.path), policy.path, policy)
    results = [rookery.evaluate(what, episodes=6, seed=3) for what in forms]
    assert all(result == results[0] for result in results)
    assert results[0].episodes == len(results[0].returns) == 6 and "returns" not in repr(results[0])
    assert rookery.evaluate(run, episodes=6, seed=4).returns != results[0].returns
    sampled = rookery.evaluate(run, episodes=6, seed=3, deterministic=False)
    assert not sampled.greedy and sampled.returns != results[0].returns


def test_the_command_line_plays_the_same(run, capsys):
    import json

    assert main(["eval", str(run.path), "--episodes", "6", "--seed", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["returns"] == rookery.evaluate(run, episodes=6, seed=3).returns
    stored = run.path / "eval"
    assert [path.name for path in stored.iterdir()] == [f"{rookery.load(run).path.name}-seed3-episodes6.json"]


def test_another_environment_with_arguments_of_its_own(run):
    assert rookery.evaluate(run, env=short, episodes=4).returns == [7.0] * 4
    assert rookery.evaluate(run, env=short, env_kwargs={"limit": 5}, episodes=4).returns == [5.0] * 4
    assert rookery.evaluate(rookery.load(run), env=lambda: short(6), episodes=4).returns == [6.0] * 4
    assert rookery.evaluate(run, env_kwargs={"sutton_barto_reward": True}, episodes=4).return_mean == -1.0
    with pytest.raises(CheckpointError, match="does not fit the environment"):
        rookery.evaluate(run, env="Acrobot-v1", episodes=2)


def test_code_that_a_stored_run_names_is_not_called_unless_it_is_trusted(tmp_path, monkeypatch):
    (tmp_path / "limited.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    own = trained(tmp_path / "run", "limited:make", env_kwargs={"limit": 9})
    assert own.modules == ("limited",)
    assert rookery.evaluate(own, episodes=2).return_max <= 9  # this process has trained it
    assert rookery.evaluate(rookery.load(own), episodes=2).return_max <= 9
    assert rookery.record(own, tmp_path / "a.mp4").frames <= 10
    del sys.modules["limited"]
    for play in (rookery.load, rookery.evaluate, rookery.record):
        with pytest.raises(UsageError, match=r'env "limited:make" called with .*trust=\(\'limited\',\)'):
            play(own.path)
    assert rookery.evaluate(own.path, env=short, env_kwargs={"limit": 5}, episodes=2).return_max == 5
    assert rookery.evaluate(rookery.load(own.path, env=short), episodes=2).return_max == 9, "its own arguments"
    assert "limited" not in sys.modules
    for what in (own.path, rookery.load(own.path, trust=("limited",))):
        assert rookery.evaluate(what, episodes=2, trust=("limited",)).return_max <= 9
    assert rookery.resume(own, env_steps=512).summary["env_steps"] >= 512


def test_a_policy_of_a_running_run_is_played_where_it_was_trained(tmp_path, monkeypatch):
    (tmp_path / "watched.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    seen = []

    def look(training):
        if training.version == 1:
            seen.append(rookery.evaluate(training.policy, episodes=2).return_max)

    trained(tmp_path / "run", "watched:make", callbacks=[look])
    assert len(seen) == 1 and seen[0] <= 20


def test_a_video_is_in_the_run_folder_or_where_it_is_wanted(run, tmp_path):
    video = rookery.record(run, max_steps=4, seed=2)
    assert video.path == run.path / f"report/{rookery.load(run).path.name}-2.mp4" and video.frames == 5
    assert video._repr_html_().startswith('<video controls loop width="480" src="data:video/mp4;base64,AAAA')
    other = rookery.record(rookery.load(run), tmp_path / "x.mkv", max_steps=4)
    assert other.path.is_file() and other._repr_html_() == f"<code>{tmp_path}/x.mkv</code>"


def test_pictures_and_pages_of_runs(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = trained(tmp_path / "other", seed=2)
    alone, both = rookery.plot(run), rookery.plot([run, other.path])
    assert (alone.path, str(both)) == (run.path / "report/curve.png", "curves.png")
    assert set(alone._repr_mimebundle_()) == {"text/plain", "image/png"}
    assert "<svg" in rookery.plot(run, out=tmp_path / "x.svg")._repr_mimebundle_()["image/svg+xml"]
    assert rookery.report(run) == run.path / "report/index.html" and rookery.report(run, other).name == "report.html"
    [row] = rookery.compare([run, other])
    assert (row.runs, row.env) == (2, "CartPole-v1")


@pytest.mark.parametrize("call, message", [
    (lambda run: rookery.evaluate(run, episodes=0), "episodes is 0; it must be at least 1"),
    (lambda run: rookery.evaluate(run, envs=0), "envs is 0; it must be at least 1"),
    (lambda run: rookery.evaluate(run, epsilon=2), "epsilon is 2; it is a share of the actions"),
    (lambda run: rookery.evaluate(None), "a run, its folder, or a policy is needed, and this is a NoneType"),
    (lambda run: rookery.evaluate(run, which="worst"), "which is 'newest' or 'best'"),
    (lambda run: rookery.evaluate(run, env="CartPole-v7"), "unknown environment 'CartPole-v7'; did you mean"),
    (lambda run: rookery.evaluate(run, env=gymnasium.make("CartPole-v1")), "exists already"),
    (lambda run: rookery.record(run, max_steps=0), "max_steps is 0"),
    (lambda run: rookery.record(run, fps=-1), "fps is -1"),
    (lambda run: rookery.record(run, "a.gif"), "a.gif: a video file ends in .mp4"),
    (lambda run: rookery.plot(), "which runs\\? give at least one run"),
    (lambda run: rookery.report(3), "a run or its folder is needed, and this is a int"),
])  # fmt: skip
def test_what_cannot_be_done_is_told_in_terms_of_the_call(run, call, message):
    with pytest.raises(UsageError, match=message) as told:
        call(run)
    assert "--" not in str(told.value)


def test_what_is_no_run_and_what_fails_is_located(run, tmp_path):
    for call in (rookery.evaluate, rookery.plot, rookery.report, rookery.compare, rookery.load):
        with pytest.raises(CheckpointError, match=f"{tmp_path} is not a run folder"):
            call(tmp_path)

    class Broken(gymnasium.Wrapper):
        def step(self, action):
            raise RuntimeError("the pole is missing")

    with pytest.raises(EnvError, match=r"(?s)the pole is missing.*test_interface\.py"):
        rookery.evaluate(run, env=lambda: Broken(short()), episodes=2)
    with pytest.raises(EnvError, match=r"(?s)the pole is missing.*test_interface\.py"):
        rookery.record(
            run,
            tmp_path / "x.mp4",
            env=lambda render_mode: Broken(gymnasium.make("CartPole-v1", render_mode=render_mode)),
        )


def test_a_run_tells_what_it_is(run):
    text, page = repr(run), run._repr_html_()
    assert text.startswith(f"<Run '{run.path}': ppo on CartPole-v1, ") and "ended by env_steps>" in text
    assert page.startswith("<table>") and str(run.path) in page
    assert repr(rookery.load(run)).startswith("<Policy ppo on CartPole-v1 after ")
    odd = rookery.Run(run.path, run.config, {"stop_reason": "<b>", "return_mean": np.float64(1)})
    assert "&lt;b&gt;" in odd._repr_html_()
    odd = rookery.Run(run.path, run.config, {"episodes": 0, "return_mean": None, "restarts": 2})
    assert "no episode has ended, 2 restarts of workers or environments" in repr(odd)


def test_a_comparison_is_a_table(run):
    rows = rookery.compare(run, target=1e9)
    head, line, note = repr(rows).splitlines()
    assert head.split() == ["setting", "environment", "runs", "return", "evaluation", "steps", "to", "return"]
    assert line.split()[:3] == ["ppo", "CartPole-v1", "1"] and "not reached; 0 of 1 reached 1,000,000,000" in line
    assert note.startswith("ppo: one run: no interval") and rows._repr_html_().count("<tr>") == 2
    rows[0] = dataclasses.replace(rows[0], label="<b>")
    assert "<b>" not in rows._repr_html_()


def test_episodes_that_do_not_end_are_told(run, monkeypatch):
    monkeypatch.setattr(evaluate, "ENDLESS", 5)
    said = []
    rookery.evaluate(run, episodes=1, tell=said.append)
    assert len(said) == 1 and said[0].startswith("no episode of CartPole-v1 has ended in 5 steps")
    monkeypatch.setattr(evaluate, "ENDLESS", 501)
    rookery.evaluate(run, episodes=1, tell=said.append)
    assert len(said) == 1


def test_names_are_offered_to_completion():
    assert set(rookery.__all__) < set(dir(rookery)) and all(getattr(rookery, name) for name in rookery.__all__)
