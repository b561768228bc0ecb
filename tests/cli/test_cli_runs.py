"""The verbs that make and read runs, on a tiny one."""

import json
import re
import shutil

import pytest

import rookery
from rookery.cli.main import main
from rookery.cli.runs import trusted
from rookery.core.errors import CheckpointError, EnvError, UsageError
from rookery.play.evaluate import divisor
from rookery.run.run import read_config
from rookery.storage import checkpoint


def test_training_leaves_a_run_with_a_curve(finished):
    assert read_config(finished).env_steps == 1500
    assert json.loads((finished / "summary.json").read_text())["exit_reason"] == "env_steps"
    assert (finished / "report" / "curve.png").stat().st_size > 1000


def test_the_closing_block_says_what_came_and_what_next(run, capsys):
    steps = newest(run)
    assert main(["resume", str(run), "--env-steps", str(steps + 300), "--quiet"]) == 0
    text = capsys.readouterr().out
    for word in (str(run), "done after", "steps/s", "curve.png", f"rookery eval {run}", f"rookery resume {run} --env"):
        assert word in text


def test_resume_goes_on_from_the_checkpoint_and_extends_the_run(run):
    steps = newest(run)
    words = ["--env-steps", str(steps + 300), "--algo.clip", "0.05", "--quiet"]
    assert main(["resume", str(run), *words]) == 0
    assert newest(run) >= steps + 300
    config = read_config(run)
    assert (config.env_steps, config.algo.clip) == (steps + 300, 0.05)


def test_resuming_a_complete_run_says_so_and_changes_nothing(run, capsys):
    before = checkpoint.all_steps(run / "checkpoints")
    assert main(["resume", str(run)]) == 0
    assert "is complete" in capsys.readouterr().out
    assert checkpoint.all_steps(run / "checkpoints") == before


REFUSED = [("--env Acrobot-v1", "belongs to the run"), ("--env-step 9", "did you mean --env-steps")]


@pytest.mark.parametrize("words, message", REFUSED)
def test_resume_refuses_what_cannot_change(run, capsys, words, message):
    assert main(["resume", str(run), *words.split()]) == UsageError.exit_code
    assert message in capsys.readouterr().err


def test_help_for_a_run_has_its_own_values(run, capsys):
    assert main(["resume", str(run), "--help"]) == 0
    assert "in environment steps (default: 1500)" in re.sub(r"[\s│]+", " ", capsys.readouterr().out)


def test_eval_as_json_is_the_result_and_nothing_else(run, capfd):
    assert main(["eval", str(run), "--episodes", "6", "--seed", "11", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["episodes"] == 6 == len(result["returns"])
    assert result["env"] == "CartPole-v1" and result["seed"] == 11 and result["greedy"] is True
    assert result["env_steps"] == newest(run)
    assert result["return_mean"] == pytest.approx(sum(result["returns"]) / 6)
    assert result["return_std"] >= 0
    stored = run / "eval" / f"{result['checkpoint']}-seed11-episodes{result['episodes']}.json"
    assert json.loads(stored.read_text()) == result


def test_eval_repeats_itself(run, capsys):
    results = []
    for _ in range(2):
        assert main(["eval", str(run), "--episodes", "4", "--sample", "--json"]) == 0
        results.append(capsys.readouterr().out)
    assert results[0] == results[1]


def test_eval_with_random_actions_stands_beside_the_greedy_one(run, capsys):
    results = []
    for words in ([], ["--epsilon", "1"], ["--epsilon", "1"]):
        assert main(["eval", str(run), "--episodes", "4", "--seed", "12", "--json", *words]) == 0
        results.append(json.loads(capsys.readouterr().out))
    greedy, mixed, again = results
    assert greedy["epsilon"] == 0.0 and mixed["epsilon"] == 1.0
    assert mixed == again and mixed["returns"] != greedy["returns"]
    names = {path.name for path in (run / "eval").glob("*-seed12*.json")}
    assert names == {f"{greedy['checkpoint']}-seed12-episodes4{how}.json" for how in ("", "-epsilon1")}


def test_eval_refuses_an_epsilon_that_is_no_share(run, capsys):
    assert main(["eval", str(run), "--epsilon", "1.5"]) == 2
    assert "from 0 to 1" in capsys.readouterr().err


def test_eval_of_one_checkpoint(run, capsys):
    (path,) = (run / "checkpoints").iterdir()
    assert main(["eval", str(path), "--episodes", "2"]) == 0
    text = capsys.readouterr().out
    assert path.name in text and "2 episodes of CartPole-v1, greedy, seed 7" in text


def test_plot_writes_the_picture_it_names(run, capsys, tmp_path):
    assert main(["plot", str(run), str(run), "--out", str(tmp_path / "two.svg")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "two.svg")
    assert "<svg" in (tmp_path / "two.svg").read_text()


def test_record_writes_a_film_beside_the_run(run, capsys):
    import imageio_ffmpeg

    assert main(["record", str(run), "--seed", "3"]) == 0
    assert "1 episode of CartPole-v1" in capsys.readouterr().out
    (film,) = (run / "report").glob("*-3.mp4")
    assert imageio_ffmpeg.count_frames_and_secs(str(film))[0] > 1


@pytest.fixture
def own_run(own_env, tmp_path):
    folder = tmp_path / "own"
    words = ["--env", f"{own_env}:make", "--env-kwargs", '{"limit": 9}', "--out", str(folder)]
    assert main(["train", "ppo", *words, "--preset", "cartpole", "--env-steps", "300", "--quiet"]) == 0
    return folder


@pytest.mark.parametrize("verb", ["eval", "resume", "record"])
def test_code_outside_rookery_needs_trust_and_the_message_has_the_command(own_run, own_env, verb, capsys):
    words = [verb, str(own_run), *(["--env-steps", "400"] if verb == "resume" else ["--episodes", "2"])]
    assert main(words) == UsageError.exit_code
    command = f"rookery {' '.join(words)} --trust {own_env}"
    assert command in capsys.readouterr().err
    assert main(command.split()[1:]) == 0


def test_what_an_environment_prints_does_not_reach_the_json(own_run, own_env, capfd):
    assert main(["eval", str(own_run), "--episodes", "3", "--json", f"--trust={own_env}"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["length_mean"] <= 9
    assert "printed by the environment" in err and "written by a library" in err


def test_the_next_commands_of_such_a_run_carry_the_trust(own_run, own_env, capsys):
    assert main(["resume", str(own_run), "--env-steps", "700", "--quiet", "--trust", own_env]) == 0
    assert f"rookery eval {own_run} --trust {own_env}" in capsys.readouterr().out


def test_a_run_that_names_a_network_or_algorithm_of_a_stranger_needs_trust(run, capsys):
    config = json.loads((run / "config.json").read_text())
    config["net"]["module"] = "strange.net:Torso"
    config["algorithm"] = "odd.algo:Thing"
    (run / "config.json").write_text(json.dumps(config))
    assert main(["eval", str(run)]) == UsageError.exit_code
    assert f"rookery eval {run} --trust odd.algo --trust strange.net" in capsys.readouterr().err
    assert main(["eval", str(run), "--trust", "odd"]) == UsageError.exit_code
    assert f"rookery eval {run} --trust odd --trust strange.net" in capsys.readouterr().err
    assert main(["eval", str(run), "--trust", "odd", "--trust", "strange.net"]) == UsageError.exit_code
    assert "No module named 'odd'" in capsys.readouterr().err, "both are trusted: now it is looked for"


def test_an_environment_that_fails_in_evaluation_is_an_env_error(own_run, own_env, capsys):
    config = json.loads((own_run / "config.json").read_text())
    config["env"], config["env_kwargs"] = f"{own_env}:broken", {}
    (own_run / "config.json").write_text(json.dumps(config))
    assert main(["eval", str(own_run), "--trust", own_env]) == 3
    assert "RuntimeError: the wheel [came off]" in capsys.readouterr().err


def test_trust_is_found_before_the_words_are_parsed():
    assert trusted(["run", "--trust", "a", "b.c", "--seed", "1", "--trust=d"]) == ("a", "b.c", "d")


def test_episodes_are_shared_evenly():
    assert [divisor(100, 8), divisor(16, 8), divisor(7, 8), divisor(11, 8)] == [5, 8, 7, 1]


def newest(run) -> int:
    return max(checkpoint.all_steps(run / "checkpoints"))


def test_a_run_without_an_update_is_not_called_a_success(tmp_path, capsys):
    words = ["--env-steps", "200", "--algo.replay.min-size", "1000", "--quiet"]
    assert main(["train", "dqn", "--env", "CartPole-v1", "--out", str(tmp_path / "run"), *words]) == 0
    assert "nothing: it ended before its first update" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_was_killed_before_its_first_checkpoint_is_resumed_from_its_start(run, capsys):
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    assert main(["train", "ppo", "--env", "CartPole-v1", "--out", str(run)]) == 2
    assert f"rookery resume {run}" in capsys.readouterr().err
    assert main(["resume", str(run), "--quiet"]) == 0
    assert "has no checkpoint yet: it starts from the beginning" in capsys.readouterr().out
    assert newest(run) >= 1500


def test_evaluations_of_different_length_stand_beside_each_other(run):
    for episodes in ("2", "4"):
        assert main(["eval", str(run), "--episodes", episodes]) == 0
    found = {json.loads(path.read_text())["episodes"] for path in (run / "eval").iterdir()}
    assert found == {2, 4}


def test_an_environment_that_cannot_be_recorded_is_named_as_such(tmp_path, monkeypatch, capsys):
    (tmp_path / "unseen_env.py").write_text(
        "import gymnasium\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--env", "unseen_env:make", "--out", str(tmp_path / "own"), "--preset", "cartpole"]
    assert main(["train", "ppo", *words, "--env-steps", "300", "--quiet"]) == 0
    assert main(["record", str(tmp_path / "own"), "--trust", "unseen_env"]) == 2
    assert "cannot be recorded: the factory does not accept render_mode" in capsys.readouterr().err


def test_a_stored_run_starts_no_compiler_unless_its_user_says_so_again(run, capsys):
    config = json.loads((run / "config.json").read_text()) | {"compile": True}
    (run / "config.json").write_text(json.dumps(config))
    before = sorted(path.name for path in run.iterdir())
    assert main(["resume", str(run), "--env-steps", "1900"]) == UsageError.exit_code
    assert "add --compile" in capsys.readouterr().err
    with pytest.raises(UsageError, match="compile=True"):
        rookery.resume(run, env_steps=1900)
    assert sorted(path.name for path in run.iterdir() if path.name != "lock") == [n for n in before if n != "lock"]
    assert main(["eval", str(run), "--episodes", "1"]) == 0, "evaluation compiles nothing"
    assert main(["resume", str(run), "--env-steps", "1900", "--no-compile", "--quiet"]) == 0
    assert json.loads((run / "config.json").read_text())["compile"] is False


@pytest.mark.parametrize("verb", ["eval", "record"])
@pytest.mark.parametrize("env", ["Acrobot-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_a_run_whose_config_names_another_environment_is_refused_in_words(run, verb, env, capsys):
    config = json.loads((run / "config.json").read_text()) | {"env": env}
    (run / "config.json").write_text(json.dumps(config))
    assert main([verb, str(run), "--episodes", "1"]) == CheckpointError.exit_code
    said = capsys.readouterr().err
    assert f"does not fit the environment {env}: it was trained on" in said and "Traceback" not in said


def test_the_commands_for_a_run_that_failed_carry_the_trust_too(own_env, tmp_path, capsys):
    folder = tmp_path / "failed"
    words = ["train", "ppo", "--env", f"{own_env}:fails_late", "--out", str(folder), "--env-steps", "5000", "--quiet"]
    assert main([*words, "--supervisor.restarts", "0"]) == EnvError.exit_code
    assert f"go on with: rookery resume {folder} --trust {own_env}" in capsys.readouterr().err
    assert main(words) == UsageError.exit_code
    assert f"resume it (rookery resume {folder} --trust {own_env})" in capsys.readouterr().err


def test_a_run_that_failed_can_be_overwritten_and_one_that_ended_cannot(run, capsys):
    words = ["train", "ppo", "--env", "CartPole-v1", "--out", str(run), "--env-steps", "300", "--quiet"]
    assert main([*words, "--overwrite"]) == UsageError.exit_code
    assert "ended without an error" in capsys.readouterr().err and newest(run) >= 1500
    (run / "summary.json").unlink()
    (run / "mine.txt").write_text("kept")
    assert main(words) == UsageError.exit_code
    assert "--overwrite" in capsys.readouterr().err and newest(run) >= 1500
    assert main([*words, "--overwrite"]) == 0
    assert newest(run) < 1500 and (run / "mine.txt").exists()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(record["env_steps"] for record in records) < 1500


def test_the_number_of_episodes_behind_the_return_is_the_one_there_was(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["train", "ppo", "--env", "CartPole-v1", "--out", str(folder), "--env-steps", "300", "--quiet"]) == 0
    episodes = json.loads((folder / "summary.json").read_text())["episodes"]
    assert 1 < episodes < 100 and f"last {episodes} episodes" in capsys.readouterr().out


def test_the_closing_block_comes_after_checkpoint_and_summary_and_does_not_decide_the_exit_code(
    tmp_path, capsys, monkeypatch
):
    folder, seen = tmp_path / "run", {}

    def broken(runs, out, within):
        seen["summary"] = json.loads((within / "summary.json").read_text())
        seen["steps"] = newest(within)
        raise RuntimeError("no font found")

    monkeypatch.setattr("rookery.metrics.plot.plot_runs", broken)
    words = ["--env-steps", "300", "--quiet", "--out", str(folder)]
    assert main(["train", "ppo", "--env", "CartPole-v1", *words]) == 0
    assert seen["steps"] == seen["summary"]["env_steps"] >= 300
    assert "not drawn: no font found" in capsys.readouterr().out
