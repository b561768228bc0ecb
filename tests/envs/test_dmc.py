"""dm_control tasks against dm_control itself: observations, rewards, ends, seeds and pictures."""

import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces

from rookery.core.config import AtariConfig, NetConfig
from rookery.core.errors import UsageError
from rookery.core.types import Leaf
from rookery.envs.check import check
from rookery.envs.dmc import DMControl, _suite, is_dmc, make_env
from rookery.envs.lanes import SyncLanes
from rookery.envs.make import make, make_single

suite = _suite("dmc/", draws=False)


class Config:
    def __init__(self, env, feed_last=False, **kwargs):
        self.env, self.env_kwargs, self.atari = env, kwargs, AtariConfig()
        self.net = NetConfig(feed_last=feed_last)


@pytest.mark.parametrize("domain, task", [("cartpole", "swingup"), ("finger", "turn_easy")])
def test_rows_are_the_tasks_own(domain, task):
    env, other = make_env(f"dmc/{domain}-{task}"), suite.load(domain, task)
    other.task.random.seed(int(np.random.Generator(np.random.PCG64(3)).integers(2**32)))
    obs, (row, names) = env.reset(seed=3)[0], (other.reset(), list(other.observation_spec()))
    rng = np.random.default_rng(0)
    for t in range(100):
        flat = np.concatenate([np.ravel(row.observation[name]) for name in names])
        assert obs.dtype == np.float32 and np.array_equal(obs, flat.astype(np.float32)), t
        action = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
        obs, reward, terminated, truncated, _ = env.step(action)
        row = other.step(action)
        assert reward == row.reward and type(reward) is float and not terminated and not truncated


def test_named_observations_if_asked_for():
    flat, named = make_env("dmc/finger-turn_easy"), make_env("dmc/finger-turn_easy", flat=False)
    assert isinstance(named.observation_space, spaces.Dict) and flat.observation_space.shape == (12,)
    vector, parts = flat.reset(seed=1)[0], named.reset(seed=1)[0]
    assert list(parts) == ["position", "velocity", "touch", "target_position", "dist_to_target"]
    assert parts["dist_to_target"].shape == (1,)  # a scalar over there
    assert named.observation_space.contains(parts) and np.array_equal(np.concatenate(list(parts.values())), vector)
    lanes = make(Config("dmc/finger-turn_easy", flat=False), 2)
    assert lanes.spec.obs["touch"] == Leaf((2,), "float32", "vector") and len(lanes.spec.obs) == 5


def test_the_time_limit_truncates():
    env = make_env("dmc/cartpole-swingup")
    env.reset(seed=1)
    rows = [env.step(np.zeros(1)) for _ in range(1000)]
    assert [row[3] for row in rows] == [False] * 999 + [True] and not any(row[2] for row in rows)
    short = make_env("dmc/cartpole-swingup", time_limit=0.05)
    short.reset(seed=1)
    assert [short.step(np.zeros(1))[3] for _ in range(5)] == [False] * 4 + [True]


def test_discount_zero_terminates():
    """lqr is the suite's one task with an end of its own: the state is close to the origin."""
    env = make_env("dmc/lqr-lqr_2_1")
    env.reset(seed=0)
    with env.inner.physics.reset_context():
        env.inner.physics.data.qpos[:] = env.inner.physics.data.qvel[:] = 0.0
    _, _, terminated, truncated, _ = env.step(np.zeros(1))
    assert terminated is True and truncated is False


def test_actions_without_bounds_are_seen_as_such():
    assert make(Config("dmc/lqr-lqr_2_1"), 1).spec.action.low == (None,)
    spec = make(Config("dmc/cartpole-swingup"), 1).spec.action
    assert (spec.kind, spec.size, spec.low, spec.high) == ("box", 1, (-1.0,), (1.0,))


def play(env, seed, steps=30):
    rows = [env.reset(seed=seed)[0]]
    for t in range(steps):
        rows.append(env.step(np.full(env.action_space.shape, np.sin(t), np.float32))[0])
    return np.array(rows)


def test_seeds_decide_the_episodes_whatever_was_played_before():
    one, two = make_env("dmc/reacher-easy"), make_env("dmc/reacher-easy")
    first = play(one, 5)
    play(two, 6, 7)
    assert np.array_equal(play(two, 5), first) and not np.array_equal(play(two, 2**40 + 5), first)
    following = [one.reset()[0], two.reset()[0]]
    assert not np.array_equal(following[0], first[0])  # later episodes are new ones
    play(one, 9), play(two, 9)
    assert np.array_equal(one.reset()[0], two.reset()[0])  # and the seed decides them too
    fresh = [make_env("dmc/reacher-easy").reset()[0] for _ in range(2)]
    assert not np.array_equal(*fresh)  # without a seed, chance


def test_all_lanes_have_the_same_physics():
    lanes = make(Config("dmc/lqr-lqr_6_2"), 2)  # whose springs are drawn when it is made
    stiff = [env.inner.physics.model.jnt_stiffness.copy() for env in lanes.envs]
    assert np.array_equal(*stiff) and stiff[0].any()


@pytest.mark.parametrize("domain, task", suite.BENCHMARKING[::4])
def test_tasks_of_the_suite_can_be_played(domain, task):
    lanes = make(Config(f"dmc/{domain}-{task}"), 1)
    assert type(lanes) is SyncLanes and list(lanes.spec.obs) == ["obs"]
    lanes.reset([1])
    rng = np.random.default_rng(0)
    for _ in range(5):
        obs, reward, terminated, truncated = lanes.step(rng.uniform(-1, 1, (1, lanes.spec.action.size)))
        assert np.isfinite(obs["obs"]).all() and 0 <= reward[0] <= 1 and not terminated and not truncated
    lanes.close()


def test_check_env_finds_it_ready():
    report = check(Config("dmc/cartpole-balance"), 400)
    assert report.ok and report.deterministic and report.in_space and not report.restorable
    fed = make(Config("dmc/cartpole-balance", feed_last=True), 1)
    fed.reset([1])
    assert fed.step(np.array([[0.5]], np.float32))[0]["last_action"].tolist() == [[0.5]]


@pytest.mark.parametrize(
    "env, kwargs, words",
    [
        ("dmc/cartpole-swingupp", {}, "no task 'dmc/cartpole-swingupp'.*did you mean dmc/cartpole-swingup,"),
        ("dmc/cartpole", {}, "an id is dmc/DOMAIN-TASK"),
        ("dmc/", {}, "an id is dmc/DOMAIN-TASK, e.g. dmc/"),
        ("dmc/cartpole-swingup", {"wheels": 3}, "does not take these env_kwargs: {'wheels': 3}"),
    ],
)
def test_what_does_not_exist_is_explained(env, kwargs, words):
    assert is_dmc(env)
    with pytest.raises(UsageError, match=words):
        make(Config(env, **kwargs), 1)
    with pytest.raises(UsageError, match=words):
        make_single(Config(env, **kwargs))


def test_pictures_even_after_physics_alone():
    assert make_env("dmc/cartpole-swingup").render() is None
    with pytest.raises(UsageError, match="'rgb_array', not 'human'"):
        make_env("dmc/cartpole-swingup", render_mode="human")
    try:
        env = make_single(Config("dmc/cartpole-swingup"), render_mode="rgb_array")
    except UsageError as error:  # a machine without EGL
        assert "cannot be drawn here" in str(error) and "install EGL" in str(error)
        return
    assert type(env) is DMControl and env.metadata["render_fps"] == 100
    pictures = []
    for seed in (1, 1, 2):
        env.reset(seed=seed)
        env.step(np.ones(1))
        pictures.append(env.render())
    assert all(picture.shape == (480, 480, 3) and picture.dtype == np.uint8 for picture in pictures)
    assert np.array_equal(pictures[0], pictures[1]) and not np.array_equal(pictures[0], pictures[2])
    assert pictures[0].std() > 10
    env.close()


BARE = "import os, sys; [os.environ.pop(n, None) for n in ('DISPLAY', 'WAYLAND_DISPLAY', 'MUJOCO_GL')]; "


def test_without_a_way_to_draw_the_fix_is_named():
    code = BARE + "os.environ['PYOPENGL_PLATFORM'] = 'osmesa'; from rookery.envs.dmc import make_env\n"
    code += "try: make_env('dmc/cartpole-swingup', render_mode='rgb_array')\n"
    code += "except Exception as error: print(type(error).__name__, error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("UsageError dmc/cartpole-swingup cannot be drawn here (")
    assert "install EGL" in done.stdout


def test_physics_alone_loads_no_graphics_and_leaves_the_choice_open():
    code = BARE + (
        "from rookery.envs.dmc import make_env; make_env('dmc/cartpole-swingup').reset(seed=1); "
        "print(sorted({'glfw', 'OpenGL', 'torch'} & set(sys.modules)), 'MUJOCO_GL' in os.environ)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[] False\n", "")
