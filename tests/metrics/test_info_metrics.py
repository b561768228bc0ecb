"""Numbers in an environment's `info` at the end of an episode become metrics, from the lanes to the summary."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import rookery
from rookery.core.config import AtariConfig, NetConfig
from rookery.core.errors import UsageError
from rookery.envs.lanes import LaneFault, SyncLanes
from rookery.envs.make import make
from rookery.envs.vector import VectorLanes
from rookery.metrics.window import ReturnWindow
from rookery.roles.episodes import Episodes


class Short(gymnasium.Env):
    """Episodes of `length` steps; `info` counts them at their ends."""

    def __init__(self, length=2, value=None, declares=()):
        self.observation_space, self.action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(2)
        self.metadata = {"render_modes": [], "episode_metrics": declares}
        self.length, self.value, self.episode = length, value, 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        over = self.t == self.length
        self.episode += over
        number = self.episode if self.value is None else self.value
        return np.zeros(1, np.float32), 1.0, over, False, {"number": number, "other": 1} if over else {}


def lanes_of(*envs, metrics=("number",)):
    lanes = SyncLanes("short", envs)
    lanes.metrics = metrics
    lanes.reset(range(len(envs)))
    return lanes


def test_lanes_keep_what_is_asked_for_until_it_is_taken():
    lanes = lanes_of(Short(1), Short(3))
    assert lanes.take_infos() is None
    for _ in range(5):  # episodes of lane 0 end in steps 0, 2 and 4, of lane 1 in step 2
        lanes.step(np.zeros(2, np.int64))
    assert lanes.take_infos() == [[{"number": 1.0}, {"number": 2.0}, {"number": 3.0}], [{"number": 1.0}]]
    assert lanes.take_infos() is None
    lanes.step(np.zeros(2, np.int64))
    lanes.step(np.zeros(2, np.int64))
    lanes.reset([1, 2])
    assert lanes.take_infos() is None  # of episodes that a reset has left behind


def test_without_names_nothing_is_kept():
    lanes = lanes_of(Short(1), metrics=())
    lanes.step(np.zeros(1, np.int64))
    assert lanes.take_infos() is None and SyncLanes("short", [Short()]).metrics == ()


def test_a_name_that_is_missing_or_no_number_is_an_error_that_says_so():
    with pytest.raises(UsageError, match=r"no 'succes' in `info` at the end of an episode .it has number, other"):
        lanes_of(Short(1), metrics=("succes",)).step(np.zeros(1, np.int64))
    with pytest.raises(UsageError, match=r"'number' in `info`.* is not a number: 'x'"):
        lanes_of(Short(1, "x")).step(np.zeros(1, np.int64))
    with pytest.raises(LaneFault, match="returned nan as 'number'") as caught:
        lanes_of(Short(1, float("nan"))).step(np.zeros(1, np.int64))
    assert caught.value.reason == "nonfinite"


def test_an_environment_declares_its_metrics_and_the_config_replaces_them():
    class Config:
        env, env_kwargs, atari = "rookery/GridNav-v0", {"size": 5}, AtariConfig()
        net, metrics_from_info = NetConfig(feed_last=True), ()

    assert SyncLanes("short", [Short(declares=("number",))]).metrics == ("number",)
    lanes = make(Config(), 2)
    assert type(lanes.inner) is VectorLanes and lanes.metrics == ("success", "spl")
    lanes.reset([1, 2])
    lanes.step(np.array([3, 0]))
    assert lanes.take_infos() == [[{"success": 0.0, "spl": 0.0}], []]
    Config.metrics_from_info = ("spl",)
    assert make(Config(), 2).metrics == ("spl",)


def test_each_episode_gets_its_own_numbers():
    told = [[{"n": 1.0}, {"n": 2.0}], [{"n": 3.0}]]
    episodes = Episodes(2, 4, lambda: told)
    ends = np.array([[1, 0], [0, 0], [1, 1]], bool)
    found = episodes.walk(ends, np.ones((3, 2), bool), np.ones((3, 2)))
    assert [(each.lane, each.length, each.info) for each in found] == [
        (4, 1, {"n": 1.0}), (4, 2, {"n": 2.0}), (5, 3, {"n": 3.0}),
    ]  # fmt: skip


def test_the_window_means_the_last_episodes_and_survives_a_checkpoint():
    window = ReturnWindow(2)
    window.add(0.0, 1)
    assert window.info_means == {}
    for value in (1.0, 0.0, 0.5):
        window.add(0.0, 1, {"success": value})
    assert window.info_means == {"success": 0.25}
    assert ReturnWindow.from_dict(json.loads(json.dumps(window.to_dict()))).info_means == {"success": 0.25}
    old = {key: value for key, value in window.to_dict().items() if key != "infos"}
    assert ReturnWindow.from_dict(old).info_means == {}


def test_a_run_logs_them(tmp_path):
    run = rookery.train(
        "ppo", env="rookery/GridNav-v0", env_kwargs={"size": 5}, actors=1, envs_per_actor=4,
        env_steps=256, threads=1, preset="vector", net={"torso": "mlp"}, algo={"unroll": 32}, quiet=True, log_every=0.0,
        out=str(tmp_path / "run"),
    )  # fmt: skip
    assert set(run.summary["info"]) == {"success", "spl"}
    assert 0.0 <= run.summary["info"]["spl"] <= run.summary["info"]["success"] <= 1.0
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["info"] for line in lines if line["kind"] == "train"][-1] == run.summary["info"]


def test_a_dictionary_gives_all_its_numbers():
    value = {"r": np.float32(2.0), "l": 3, "won": True, "name": "a", "trace": np.zeros(4)}
    lanes = lanes_of(Short(1, value))
    lanes.step(np.zeros(1, np.int64))
    assert lanes.take_infos() == [[{"number.r": 2.0, "number.l": 3.0, "number.won": 1.0}]]
    with pytest.raises(UsageError, match=r"is not a number: \{'name': 'a'\}"):
        lanes_of(Short(1, {"name": "a"})).step(np.zeros(1, np.int64))


class Recorded(gymnasium.vector.VectorEnv):
    """Lane 0 ends after each step, lane 1 never; `info` in Gymnasium's form for vectors."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs=2):
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(2)
        self.observation_space = spaces.Box(0, 1, (num_envs, 1), np.float32)
        self.action_space = spaces.MultiDiscrete([2] * num_envs)

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(self, actions):
        ends = np.arange(self.num_envs) == 0
        episode = {"r": np.where(ends, 5.0, 0.0), "_r": ends}
        nothing = np.zeros(self.num_envs, bool)
        return self.reset()[0], np.ones(self.num_envs), ends, nothing, {"episode": episode, "_episode": ends}


def test_a_dictionary_of_a_vector_gives_the_numbers_of_its_lane():
    lanes = VectorLanes("recorded", Recorded())
    lanes.metrics = ("episode",)
    lanes.reset([1, 2])
    lanes.step(np.zeros(2, np.int64))
    assert lanes.take_infos() == [[{"episode.r": 5.0}], []]


def test_they_come_from_python_and_from_the_command_line_alike(tmp_path):
    from rookery.cli.configure import config_for

    python = rookery.configure("ppo", "CartPole-v1", metrics_from_info=("episode", "success"))
    words = ["--env", "CartPole-v1", "--metrics-from-info", "episode", "success"]
    assert config_for("ppo", words, "rookery train ppo").metrics_from_info == python.metrics_from_info

    def make():
        return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1", max_episode_steps=10))

    run = rookery.train(
        "ppo", env=make, envs_per_actor=2, env_steps=64, algo={"unroll": 16, "epochs": 1, "minibatches": 1}, quiet=True,
        metrics_from_info=("episode",), out=str(tmp_path / "run"),
    )  # fmt: skip
    assert run.summary["info"]["episode.r"] == run.summary["return_mean"]
    assert run.summary["info"]["episode.l"] == run.summary["return_mean"]
