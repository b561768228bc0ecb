"""`env=` in Python: callables of every kind, ids of this process, scripts; and how such a run is resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import gymnasium
import pytest
import support_flaky

import rookery
from rookery.core.errors import EnvError, UsageError
from rookery.envs.make import make as make_lanes
from rookery.run.env import resolve
from rookery.storage.stored import decode_config
from rookery.storage.trust import Refused

SMALL = {"envs_per_actor": 2, "env_steps": 64, "quiet": True, "algo": {"unroll": 16, "epochs": 1, "minibatches": 1}}
TIMEOUT = 180


def short(limit=20):
    return gymnasium.make("CartPole-v1", max_episode_steps=limit)


class Short(gymnasium.Wrapper):
    def __init__(self, limit=20):
        super().__init__(short(limit))


@pytest.fixture(autouse=True)
def nothing_fails():
    support_flaky.plan.clear()


def test_a_lambda_trains_in_serial_and_is_given_again_to_resume(tmp_path):
    calls = []
    run = rookery.train("ppo", env=lambda limit: calls.append(limit) or short(limit), env_kwargs={"limit": 5},
                        out=str(tmp_path / "run"), **SMALL)  # fmt: skip
    assert set(calls) == {5} and run.summary["return_mean"] == 5.0
    stored = json.loads((run.path / "config.json").read_text())
    assert stored["env"].startswith("<lambda") and stored["env"] == run.config.env
    assert rookery.load(run.path).predict([0.0, 0.0, 0.0, 0.0])[0] in (0, 1)
    with pytest.raises(Refused, match=r"was an object of the Python process; in Python, give it again with env="):
        rookery.resume(run.path, env_steps=128)
    with pytest.raises(UsageError, match="cannot be resumed with 3"):
        rookery.resume(run.path, env=lambda limit: short(limit), envs_per_actor=3)
    assert json.loads((run.path / "config.json").read_text()) == stored  # as it was
    again = rookery.resume(run.path, env=lambda limit: short(limit), env_steps=128)
    assert again.summary["env_steps"] >= 128 and again.summary["return_mean"] == 5.0


def test_a_lambda_and_worker_processes_do_not_go_together(tmp_path):
    with pytest.raises(
        UsageError, match=r"env <lambda.*> is a lambda.*topology 'local'.*topology='serial', or write it"
    ):
        rookery.train("ppo", env=lambda: short(), topology="local", out=str(tmp_path / "run"), **SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("env", [short, Short])
def test_a_function_or_class_of_a_module_is_recorded_by_its_path(tmp_path, env):
    run = rookery.train("ppo", env=env, out=str(tmp_path / "run"), **SMALL)
    assert run.config.env == f"{__name__}:{env.__name__}"
    with pytest.raises(Refused, match=f"trust=.'{__name__}'"):
        rookery.resume(run.path, env_steps=128)
    assert rookery.resume(run.path, env=env, env_steps=128).config.env == run.config.env


def test_a_function_of_a_module_is_imported_by_workers(tmp_path):
    run = rookery.train("ppo", env=short, topology="local", actors=1, out=str(tmp_path / "run"), **SMALL)
    assert run.summary["exit_reason"] == "env_steps" and run.config.env == f"{__name__}:short"


def test_a_notebook_trains_in_serial_and_says_what_to_do_for_workers(tmp_path, monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    cell = "import gymnasium\ndef make(limit=20):\n    return gymnasium.make('CartPole-v1', max_episode_steps=limit)\n"
    exec(cell, vars(main))
    run = rookery.train("ppo", env=main.make, out=str(tmp_path / "run"), **SMALL)
    assert run.config.env.startswith("<make")
    with pytest.raises(UsageError, match=r"a notebook or an interactive session.*topology='serial'"):
        rookery.train("ppo", env=main.make, topology="local", out=str(tmp_path / "other"), **SMALL)


def test_a_stored_name_without_a_path_makes_nothing_by_itself(tmp_path):
    """Not even in the process where an object has that name: what it is called with comes from the file."""
    config = rookery.configure("ppo", lambda: short(), **SMALL)
    assert make_lanes(config, 1).count == 1
    from rookery.algorithms.registry import encode_config

    with pytest.raises(Refused):
        decode_config(encode_config(config))
    with pytest.raises(Refused):
        decode_config(encode_config(config), trust=("test_env",))
    assert decode_config(encode_config(config), env=None).env == config.env
    named = encode_config(rookery.configure("ppo", short, **SMALL))
    with pytest.raises(Refused):  # a path that can be imported is judged as before
        decode_config(named, env=None)


def test_a_run_that_cannot_be_resumed_from_the_command_line_says_how(tmp_path):
    def fails(*_):
        support_flaky.plan |= {"step": 30}
        return support_flaky.make()

    with pytest.raises(EnvError) as caught:
        rookery.train("ppo", env=fails, out=str(tmp_path / "run"), supervisor={"restarts": 0}, **SMALL)
    assert any("env=...)" in note for note in caught.value.__notes__)


def test_arguments_that_are_no_json_are_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be stored in a config"):
        rookery.train("ppo", env=short, env_kwargs={"limit": object()}, preset="vector", out=str(tmp_path), **SMALL)


def test_an_id_of_this_process_is_named_by_the_module_that_registers_it(tmp_path, monkeypatch):
    (tmp_path / "own_ids.py").write_text(
        "import gymnasium\n"
        "def make(**more):\n    return gymnasium.make('CartPole-v1', max_episode_steps=7)\n"
        "gymnasium.register('OwnIds-v0', entry_point=make)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_ids  # noqa: F401

    try:
        assert resolve("OwnIds-v0") == "own_ids:OwnIds-v0"
        run = rookery.train("ppo", env="OwnIds-v0", topology="local", actors=1, out=str(tmp_path / "run"), **SMALL)
        assert run.config.env == "own_ids:OwnIds-v0" and run.summary["return_mean"] == 7.0
        again = rookery.resume(run.path, trust=("own_ids",), topology="serial", env_steps=128)
        assert again.summary["env_steps"] >= 128
    finally:
        del gymnasium.registry["OwnIds-v0"], sys.modules["own_ids"]


def test_an_id_that_no_module_registers_trains_in_serial_only(tmp_path):
    gymnasium.register("OnlyHere-v0", entry_point=short)
    try:
        run = rookery.train("ppo", env="OnlyHere-v0", out=str(tmp_path / "run"), **SMALL)
        assert run.config.env == "OnlyHere-v0"
        with pytest.raises(UsageError, match=r"is registered in this process only.*env='module:Id-v0'"):
            rookery.train("ppo", env="OnlyHere-v0", topology="local", out=str(tmp_path / "other"), **SMALL)
    finally:
        del gymnasium.registry["OnlyHere-v0"]


def test_ids_of_gymnasium_ask_nobody(monkeypatch):
    monkeypatch.setattr("rookery.run.env.ask", None)
    assert resolve("CartPole-v1") == "CartPole-v1" and resolve("NoSuchThing-v0") == "NoSuchThing-v0"


SCRIPT = """
import os
import gymnasium, rookery

with open({log!r}, "a") as log:
    log.write(__name__ + "\\n")

def make(limit=9):
    return gymnasium.make("CartPole-v1", max_episode_steps=limit)
"""
TRAIN = """
run = rookery.train("ppo", env=make, topology="local", actors=1, envs_per_actor=2, env_steps=64, quiet=True,
                    algo={"unroll": 16, "epochs": 1, "minibatches": 1}, out=os.environ["OUT"])
print(run.config.env, run.summary["return_mean"])
"""


def started(tmp_path, text):
    (tmp_path / "my_script.py").write_text(SCRIPT.format(log=str(tmp_path / "log")) + text)
    command, environment = [sys.executable, str(tmp_path / "my_script.py")], os.environ | {"OUT": str(tmp_path / "run")}
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, cwd="/", env=environment)


def test_workers_import_the_running_script_under_its_own_name(tmp_path):
    guarded = 'if __name__ == "__main__":' + TRAIN.replace("\n", "\n    ")
    done = started(tmp_path, guarded)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["my_script:make", "9.0"] and "Warning" not in done.stderr
    names = (tmp_path / "log").read_text().split()
    assert names[0] == "__main__" and set(names[1:]) == {"my_script"}


def test_a_script_without_a_guard_is_warned_of_and_does_not_start_itself(tmp_path):
    done = started(tmp_path, TRAIN)
    assert done.returncode != 0
    assert 'has no `if __name__ == "__main__":`' in done.stderr
    assert "importing 'my_script:make' starts a run" in done.stderr
