"""From a name to environments: ids, factories, versions of their own, and what is said when a name is wrong."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers import TimeLimit

from rookery.core.config import AtariConfig, NetConfig
from rookery.core.errors import EnvError, UsageError
from rookery.envs.atari import AtariLanes
from rookery.envs.cartpole import CartPoleVector
from rookery.envs.lanes import SyncLanes
from rookery.envs.make import make, make_single
from rookery.envs.scripted import Counter
from rookery.envs.vector import MaskedLanes, VectorLanes


class Config:
    def __init__(self, env, **kwargs):
        self.env, self.env_kwargs, self.atari, self.net = env, kwargs, AtariConfig(), NetConfig()


# Factories of a user: this module is importable as "test_env_make".


def counter(length=5, render_mode=None):
    return Counter(lengths=[length])


def batch(num_envs, mode="NextStep"):
    return VectorWrapper(SyncVectorEnv([Counter] * num_envs, autoreset_mode=AutoresetMode(mode)))


def too_few(num_envs):
    return batch(1)


def unvectorised(num_envs):
    return Counter()


def nothing():
    return None


def failing():
    raise RuntimeError("no licence")


NOT_CALLED = 3
OWN = ("rookery/TMaze-v0", "rookery/RepeatPrevious-v0", "rookery/CartPoleMasked-v0", "rookery/CliffWalk-v0")
OWN += ("rookery/Catch-v0", "rookery/PixelSwitch-v0", "rookery/Cue-v0")


def test_a_gymnasium_id_runs_in_our_loop_without_watchers():
    lanes = make(Config("Pendulum-v1"), 2)
    assert type(lanes) is SyncLanes and lanes.count == 2 and lanes.spec.id == "Pendulum-v1"
    env = lanes.envs[0]
    assert type(env) is TimeLimit and env.env is env.unwrapped  # neither checker nor order enforcement
    assert lanes.envs[0].unwrapped is not lanes.envs[1].unwrapped


def test_cartpole_runs_as_a_batch_with_its_limit():
    lanes = make(Config("CartPole-v1"), 3)
    assert type(lanes) is VectorLanes and type(lanes.env) is CartPoleVector and lanes.env.limit == 500
    assert make(Config("CartPole-v0"), 1).env.limit == 200
    assert make(Config("CartPole-v1", max_episode_steps=9), 1).env.limit == 9


@pytest.mark.parametrize("env_id", OWN)
def test_our_tasks_run_as_a_batch_and_alone(env_id):
    lanes, single = make(Config(env_id), 2), make_single(Config(env_id))
    assert type(lanes) is VectorLanes and lanes.spec == SyncLanes(env_id, [single]).spec
    assert [leaf.stack for leaf in lanes.spec.obs.values()] == [1] and not lanes.spec.clipped


def test_kwargs_reach_the_environment():
    assert make(Config("rookery/Counter-v0", lengths=[7]), 1).envs[0].unwrapped.lengths == (7,)
    assert make(Config("rookery/TMaze-v0", length=3), 1).env.length == 3
    assert make(Config("test_env_make:counter", length=2), 1).envs[0].lengths == (2,)


def test_a_factory_is_called_once_per_lane():
    lanes = make(Config("test_env_make:counter"), 3)
    assert type(lanes) is SyncLanes and len({id(env) for env in lanes.envs}) == 3


@pytest.mark.parametrize("mode, adapter", [("NextStep", VectorLanes), ("Disabled", MaskedLanes)])
def test_a_factory_that_takes_num_envs_makes_the_batch(mode, adapter):
    lanes = make(Config("test_env_make:batch", mode=mode), 3)
    assert type(lanes) is adapter and lanes.count == 3


@pytest.mark.parametrize(
    "env, kwargs, words",
    [
        ("test_env_make:batch", {"mode": "SameStep"}, "SAME_STEP"),
        ("test_env_make:too_few", {}, "returned 1 environments for num_envs=2"),
        ("test_env_make:unvectorised", {}, "returned a Counter; it takes num_envs and should return .*VectorEnv"),
        ("test_env_make:nothing", {}, "returned a NoneType; it should return a gymnasium.Env"),
        ("test_env_make:countr", {}, "test_env_make has no 'countr'; did you mean counter"),
        ("test_env_make:counter", {"lenght": 3}, "does not take these env_kwargs: {'lenght': 3}"),
        ("no_such_module:make", {}, "no module 'no_such_module'.*PYTHONPATH"),
        ("CartPole-v1", {"wheels": 3}, "does not take these env_kwargs: {'wheels': 3}"),
        ("Pendulum-v1", {"wheels": 3}, "does not take these env_kwargs"),
        ("Cartpole-v1", {}, "unknown environment 'Cartpole-v1'; did you mean CartPole-v"),
        ("CartPole", {}, "did you mean CartPole-v"),
        ("CartPole-v7", {}, "did you mean CartPole-v0, CartPole-v1"),
        ("pendulum-v1", {}, "did you mean Pendulum-v1"),
        ("rookery/Tmaze-v0", {}, "did you mean rookery/TMaze-v0"),
        ("something entirely else", {}, r"unknown environment .*package\.module:factory"),
        ("ALE/Pnog-v5", {}, "no Atari game 'Pnog'; did you mean ALE/Pong-v5"),
        ("ALE/Pong-v5", {"difficulty": 1}, "takes no env_kwargs .difficulty.; Atari options"),
    ],
)
def test_a_request_that_cannot_be_met_is_explained(env, kwargs, words):
    with pytest.raises(UsageError, match=words):
        make(Config(env, **kwargs), 2)


@pytest.mark.parametrize(
    "module, env, words",
    [
        ("ale_py", "ALE/Pong-v5", r"ale-py .*pip install 'rookery\[atari\]'"),
        ("mujoco", "HalfCheetah-v5", r"not installed.*pip install 'rookery\[mujoco\]'"),
        ("imageio", "HalfCheetah-v5", r"not installed.*pip install 'rookery\[mujoco\]'"),
        ("Box2D", "LunarLander-v3", r"not installed.*pip install 'rookery\[box2d\]'"),
        ("dm_control", "dmc/cartpole-swingup", r"needs dm_control: pip install 'rookery\[dmc\]'"),
    ],
)
def test_without_its_package_the_extra_is_named(monkeypatch, module, env, words):
    for loaded in [name for name in sys.modules if name.startswith(("gymnasium.envs.mujoco", "gymnasium.envs.box2d"))]:
        monkeypatch.delitem(sys.modules, loaded)  # what was imported while the package was there
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=words):
        make(Config(env), 1)


def test_no_lanes_are_refused():
    with pytest.raises(UsageError, match="at least one"):
        make(Config("CartPole-v1"), 0)


@pytest.mark.parametrize("env, kwargs", [("test_env_make:failing", {}), ("rookery/Faulty-v0", {"fault": "raise_init"})])
def test_an_environment_that_fails_in_its_constructor_is_at_fault(env, kwargs):
    with pytest.raises(EnvError, match=r"raised when it was made: RuntimeError: (no licence|scripted fault)") as caught:
        make(Config(env, **kwargs), 1)
    assert caught.value.reason == "env_raised"


def test_environments_already_made_are_closed_when_a_later_one_fails(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(Counter, "close", lambda self: closed.append(self))
    made = iter([Counter(), Counter()])
    monkeypatch.setattr(sys.modules[__name__], "counter", lambda: next(made))
    with pytest.raises(EnvError, match="StopIteration"):
        make(Config("test_env_make:counter"), 3)
    assert len(closed) == 2


def test_a_vector_version_of_another_mode_gives_way_to_single_environments():
    name = "test-same-step/Counter-v0"
    gymnasium.register(name, Counter, vector_entry_point=lambda num_envs: batch(num_envs, "SameStep"))
    try:
        assert type(make(Config(name), 2)) is SyncLanes
    finally:
        del gymnasium.registry[name]


def test_gymnasiums_module_and_id_are_understood():
    lanes = make(Config("rookery.envs:rookery/Counter-v0"), 1)
    assert type(lanes) is SyncLanes and lanes.spec.id == "rookery.envs:rookery/Counter-v0"


def test_older_atari_ids_are_atari_whoever_registered_them():
    for env_id in ("PongNoFrameskip-v4", "Pong-v4"):
        lanes = make(Config(env_id), 1)
        assert type(lanes) is AtariLanes and lanes.spec.obs["obs"].shape == (4, 84, 84)
        lanes.close()


def test_a_single_environment_can_be_drawn():
    for env in ("rookery/CartPoleMasked-v0", "test_env_make:counter"):
        assert isinstance(make_single(Config(env), render_mode="rgb_array"), gymnasium.Env)
    with pytest.raises(UsageError, match="needs a single"):
        make_single(Config("test_env_make:nothing"))


def test_registration_loads_no_torch_and_no_extra():
    code = (
        "import sys, gymnasium, rookery.envs; gymnasium.make('rookery/TMaze-v0'); "
        "from rookery.envs.make import make; from rookery.envs.check import check; "
        "print(sorted({'torch', 'ale_py', 'dm_control', 'mujoco'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("fault, code", [("kill", -9), ("exit", 13)])
def test_a_faulty_environment_takes_its_process_with_it(fault, code):
    script = f"from rookery.envs.scripted import Faulty; env = Faulty({fault!r}); env.reset(); "
    script += "print('up', flush=True); env.step(0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "up\n")


def test_lane_seeds_decide_the_episodes():
    for env_id in ("Pendulum-v1", "CartPole-v1"):
        lanes = make(Config(env_id), 2)
        first, second, third = (lanes.reset(seeds)["obs"].copy() for seeds in ([1, 2], [1, 2], [2, 2]))
        assert np.array_equal(first, second) and np.array_equal(third[0], first[1]) and not np.array_equal(first, third)


def test_a_game_of_cards_is_a_tuple_of_integers():
    lanes = make(Config("Blackjack-v1"), 2)
    obs = lanes.reset([1, 2])
    assert {name: (leaf.kind, leaf.n) for name, leaf in lanes.spec.obs.items()} == {
        "0": ("discrete", 32), "1": ("discrete", 11), "2": ("discrete", 2),
    }  # fmt: skip
    assert obs["0"].min() >= 4 and obs["0"].max() <= 21
