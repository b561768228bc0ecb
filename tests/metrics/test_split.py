"""The time split adds up, whatever was measured, and its advice names the largest share and a setting that exists."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.algorithms.dqn import DQNConfig
from rookery.core.config import ReplayConfig, RunConfig
from rookery.core.wording import command_line
from rookery.metrics.split import STAGES, Split, advice, shares

CONFIG = RunConfig(recipe="ppo", algorithm="m:C", env="CartPole-v1", algo=None, topology="serial")
seconds = st.dictionaries(st.sampled_from(STAGES), st.floats(0, 1e6))
wall = st.floats(0, 1e6)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_stages_count_their_own_time_without_the_inner_ones():
    clock = Clock()
    split = Split(clock)
    with split.stage("learn"):
        clock.now += 1
        with split.stage("transfer"):
            clock.now += 2
            with split.stage("learn"):
                clock.now += 4
        with split.stage("wait"):
            clock.now += 8
    clock.now += 16
    split.add("env", 3.0)
    assert {name: seconds for name, seconds in split.seconds.items() if seconds} == {
        "env": 3, "learn": 5, "transfer": 2, "wait": 8,
    }  # fmt: skip
    assert split.shares(36)["other"] == pytest.approx(18 / 36)


def test_a_stage_left_by_an_exception_is_still_closed():
    clock = Clock()
    split = Split(clock)
    with pytest.raises(KeyError), split.stage("env"):
        clock.now += 1
        raise KeyError
    with split.stage("learn"):
        clock.now += 1
    assert split.seconds["env"] == 1 and split.seconds["learn"] == 1


def test_an_unknown_stage_is_an_error():
    with pytest.raises(KeyError):
        Split().stage("sleep")
    with pytest.raises(KeyError):
        Split().add("sleep", 1.0)


@given(seconds, wall)
def test_shares_sum_to_one(seconds, wall):
    result = shares(seconds, wall)
    assert sum(result.values()) == pytest.approx(1.0) and tuple(result) == STAGES and min(result.values()) >= 0


@pytest.mark.parametrize(
    ("stage", "changes", "cores", "words", "flags"),
    [
        ("env", {}, 8, "topology='local', actors=8", "--topology local --actors 8"),
        ("env", {"topology": "local", "actors": 2}, 8, "actors=4", "--actors 4"),
        ("env", {"topology": "local", "actors": 8}, 8, "a lighter environment", ""),
        ("env", {}, 1, "a lighter environment", ""),
        ("inference", {}, 2, "envs_per_actor=16", "--envs-per-actor 16"),
        ("learn", {}, 2, "compile=True, or device='cuda'", "--compile, or --device cuda"),
        ("learn", {"device": "cuda"}, 2, "fewer epochs", ""),
        (
            "learn", {"algo": DQNConfig(replay=ReplayConfig(samples_per_insert=8.0))}, 2,
            'algo={"replay": {"samples_per_insert": 4.0}}, a smaller', "--algo.replay.samples-per-insert 4, a smaller",
        ),
        (
            "learn", {"algo": DQNConfig(replay=ReplayConfig(samples_per_insert=0.0))}, 2,
            "a smaller algo.replay.batch", "a smaller --algo.replay.batch",
        ),
        ("env", {"topology": "async_grads", "actors": 1}, 2, "actors=2", "--actors 2"),
        ("transfer", {}, 2, "unroll", ""),
        ("wait", {"topology": "local", "actors": 8}, 2, "actors=2", "--actors 2"),
        ("wait", {"topology": "local", "actors": 2}, 2, "envs_per_actor=16", "--envs-per-actor 16"),
        ("other", {}, 2, "profiler", ""),
    ],
)  # fmt: skip
def test_advice_names_the_largest_share_and_a_remedy(stage, changes, cores, words, flags):
    """In terms of Python, and on the command line of flags."""

    def told():
        rest = "other" if stage != "other" else "env"
        return advice({stage: 0.62, rest: 0.38}, dataclasses.replace(CONFIG, **changes), cores)

    assert "limits the run (62%): try " in told() and words in told() and "--" not in told() and "\n" not in told()
    with command_line():
        assert (flags or words) in told()
    assert words in told()


def test_advice_is_modest_about_a_small_lead_and_silent_without_data():
    assert "takes the largest share (30%)" in advice({"env": 0.3, "learn": 0.25}, CONFIG, 2)
    assert advice({}, CONFIG, 2) == "" and advice({"env": None}, CONFIG, 2) == ""
