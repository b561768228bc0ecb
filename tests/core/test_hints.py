"""What a user may have meant."""

import pytest

import rookery
from rookery.cli.main import main
from rookery.core import hints
from rookery.core.config import RunConfig
from rookery.core.errors import RookeryError, UsageError
from rookery.recipes import RECIPES
from rookery.recipes.recipe import paths


@pytest.mark.parametrize(
    "recipe, fields, said",
    [
        ("ppo", {"lr": 1e-3}, r"""no field 'lr'; did you mean algo={"lr": ...}?"""),
        ("ppo", {"total_timesteps": 1_000}, "did you mean env_steps?"),
        ("ppo", {"algo": {"learning_rate": 1e-3}}, """no field 'algo.learning_rate'; did you mean algo={"lr": ...}?"""),
        ("dqn", {"algo": {"buffer_size": 9}}, """did you mean algo={"replay": {"capacity": ...}}?"""),
        ("dqn", {"batch_size": 64}, """did you mean algo={"replay": {"batch": ...}}?"""),
        ("ppo", {"batch_size": 64}, """did you mean algo={"minibatches": ...}?"""),
        ("ppo", {"net": {"xyzzy": 1}}, "no field 'net.xyzzy'; fields of net: action_mask, activation"),
        (
            "dqn",
            {"algo": {"replay": 3}},
            """algo.replay is a group of fields; give those to change: algo={"replay": {""",
        ),
        ("PPO", {}, "no recipe 'PPO'; did you mean ppo?"),
        ("SAC", {}, "for continuous actions there are ppo, ddpg, d4pg and apex_dpg"),
        ("QR-DQN", {}, "the nearest are c51 and rainbow"),
        (print, {}, "it must be a name, such as 'ppo'"),
        ("ppo", {"init_best": True}, "init_best=True is for init_from=...: which run?"),
    ],
)
def test_a_wrong_name_in_python_is_answered_with_what_to_write(recipe, fields, said):
    with pytest.raises(UsageError) as told:
        rookery.configure(recipe, "CartPole-v1", **fields)
    assert said in str(told.value)


@pytest.mark.parametrize(
    "flag, said",
    [
        ("--lr", "--algo.lr"),
        ("--total-timesteps", "--env-steps"),
        ("--algo.learning-rate", "--algo.lr"),
        ("--n_envs", "--envs-per-actor or --actors"),
        ("--env_step", "--env-steps"),
    ],
)
def test_a_wrong_flag_is_answered_with_the_right_one(flag, said, capsys):
    assert main(["train", "ppo", "--env", "CartPole-v1", flag, "3"]) == UsageError.exit_code
    assert f"; did you mean {said}" in capsys.readouterr().err


def test_names_of_other_libraries_stand_for_fields_that_exist():
    configs = (RunConfig(each.name, each.algorithm, "x", algo=each.config()) for each in RECIPES.values())
    known = {path for config in configs for path in paths(config)}
    assert {path for found in hints.ELSEWHERE.values() for path in found} <= known


def test_an_unknown_environment_is_answered_in_the_words_of_the_caller(capsys):
    with pytest.raises(UsageError, match=r"an environment of your own: env='package.module:factory'"):
        rookery.configure("ppo", "CartPole-v7")
    assert main(["train", "ppo", "--env", "CartPole-v7"]) == UsageError.exit_code
    assert "an environment of your own: --env package.module:factory" in capsys.readouterr().err


def test_the_folder_of_a_sweep_is_not_a_run(tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    for read in (rookery.load, rookery.plot, rookery.compare, rookery.resume):
        with pytest.raises(RookeryError, match=rf"a sweep, and not of a run: its runs are in {tmp_path}/runs"):
            read(tmp_path)
