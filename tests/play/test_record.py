"""Films: complete, of the right game, and without memory of their frames."""

import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest

from rookery.core.config import AtariConfig, NetConfig
from rookery.core.errors import EnvError, StorageError, UsageError
from rookery.core.seeding import seed_of
from rookery.envs.lanes import LaneFault
from rookery.envs.make import make
from rookery.play.policy import load
from rookery.play.record import Film, _frame, record
from rookery.run.run import train


class Still:
    """A policy that always takes action 0, whatever it sees."""

    def check_fits(self, spec):
        pass

    def initial_state(self, lanes):
        return {}

    def act_batch(self, obs, state, explore=None):
        self.seen = {name: (x.shape, x.dtype) for name, x in obs.items()}
        return np.zeros(len(next(iter(obs.values()))), np.int64), state


def described(env: str, **kwargs) -> SimpleNamespace:
    return SimpleNamespace(env=env, env_kwargs=kwargs, atari=AtariConfig(), net=NetConfig())


def frames(path) -> list[np.ndarray]:
    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return [np.frombuffer(raw, np.uint8).reshape(height, width, 3) for raw in reader]


def factory(shapes=((64, 64, 3),), dtype="uint8", fail_at=None):
    class Painter(gymnasium.Env):
        """Three steps; picture t has shape shapes[t] and brightness 40 t."""

        observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)
        metadata = {"render_fps": 10}  # noqa: RUF012

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.t += 1
            if self.t == fail_at:
                raise RuntimeError("fell over")
            return np.zeros(1, np.float32), 1.0, self.t == 3, False, {}

        def render(self):
            return np.full(shapes[min(self.t, len(shapes) - 1)], 40 * self.t, dtype)

    return Painter()


@pytest.fixture
def painter(monkeypatch):
    """`painter(**how)` is the description of an environment that paints; see `factory`."""

    def build(**how):
        monkeypatch.setattr("rookery.play.record.make_single", lambda config, render_mode: factory(**how))
        return described("painter")

    return build


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train("ppo", "CartPole-v1", env_steps=600, quiet=True, out=str(tmp_path_factory.mktemp("record") / "run"))


def test_a_film_plays_and_has_a_picture_per_step_and_one_for_the_start(run, tmp_path):
    done = record(load(run.path), run.config, tmp_path / "deep" / "film.mp4", episodes=2)
    assert done.path == tmp_path / "deep" / "film.mp4" and len(done.returns) == 2
    assert done.frames == sum(done.returns) + 2  # CartPole's return is its length
    count, seconds = imageio_ffmpeg.count_frames_and_secs(str(done.path))
    assert count == done.frames and seconds == pytest.approx(count / 50, abs=0.05)
    assert frames(done.path)[0].shape == (400, 600, 3)
    assert [path.name for path in done.path.parent.iterdir()] == ["film.mp4"]


def test_the_film_shows_the_game_that_evaluation_would_play(run, tmp_path):
    policy = load(run.path)
    done = record(policy, run.config, tmp_path / "film.mp4", seed=5)
    lanes = make(run.config, 1, training=False)
    obs, state, total = lanes.reset([seed_of(5, "record", 0) % 2**31]), policy.initial_state(1), 0.0
    ended = False
    while not ended:
        action, state = policy.act_batch(obs, state)
        obs, reward, terminated, truncated = lanes.step(action)
        total, ended = total + reward[0], terminated[0] or truncated[0]
    lanes.close()
    assert done.returns == [total]


def test_the_same_seed_gives_the_same_film(run, tmp_path):
    films = [record(load(run.path), run.config, tmp_path / f"{i}.mp4", greedy=False).path for i in range(2)]
    first, second = map(frames, films)
    assert len(first) == len(second) and all((a == b).all() for a, b in zip(first, second))


def test_a_recurrent_policy_is_filmed_too(tmp_path):
    fields = {"net.core": "gru", "algo.unroll": 32, "quiet": True, "env_steps": 300}
    run = train("ppo", "CartPole-v1", out=str(tmp_path / "run"), **fields)
    assert record(load(run.path), run.config, tmp_path / "film.mp4", max_steps=5).frames <= 6


def test_atari_shows_its_screen_in_colour_while_the_policy_sees_what_it_was_trained_on(tmp_path):
    policy = Still()
    done = record(policy, described("ALE/Breakout-v5"), tmp_path / "film.mp4", max_steps=8)
    assert policy.seen == {"obs": ((1, 4, 84, 84), np.uint8)}
    assert (done.frames, done.fps) == (9, 15)
    picture = frames(done.path)[-1].astype(int)
    assert picture.shape == (420, 320, 3)
    assert abs(picture[..., 0] - picture[..., 2]).max() > 100  # red bricks, not grey ones


def test_pictures_arrive_in_order(painter, tmp_path):
    done = record(Still(), painter(), tmp_path / "film.mp4")
    assert (done.frames, done.fps, done.returns) == (4, 10, [3.0])
    assert [round(float(frame.mean()) / 40) for frame in frames(done.path)] == [0, 1, 2, 3]


def test_an_endless_episode_is_cut_and_said_so(painter, tmp_path):
    done = record(Still(), painter(), tmp_path / "film.mp4", max_steps=2)
    assert (done.frames, done.returns) == (3, [2.0]) and "cut after 2 steps" in done.note


@pytest.mark.parametrize(
    "how, error, message",
    [
        ({"shapes": ((64, 64, 3), (32, 64, 3))}, EnvError, "changed its size"),
        ({"shapes": ((64, 64),)}, EnvError, "a video needs uint8"),
        ({"dtype": "float32"}, EnvError, "a video needs uint8"),
        ({"fail_at": 2}, LaneFault, "fell over"),
    ],
)
def test_a_film_that_fails_leaves_nothing_behind(painter, tmp_path, how, error, message):
    with pytest.raises(error, match=message):
        record(Still(), painter(**how), tmp_path / "film.mp4")
    assert list(tmp_path.iterdir()) == []


def test_a_film_that_fails_leaves_the_old_one(painter, tmp_path):
    old = record(Still(), painter(), tmp_path / "film.mp4").path.read_bytes()
    with pytest.raises(LaneFault):
        record(Still(), painter(fail_at=1), tmp_path / "film.mp4")
    assert (tmp_path / "film.mp4").read_bytes() == old


def test_frames_are_not_kept(tmp_path):
    film = Film(tmp_path / "film.mp4", 10)
    picture = np.zeros((400, 400, 3), np.uint8)
    remembered = weakref.ref(picture)
    film.add(picture)
    picture = np.zeros((400, 400, 3), np.uint8)  # the writer holds the last one only
    film.add(picture)
    assert remembered() is None
    film.close()


@pytest.mark.parametrize("shape, size", [((7, 5), (448, 320)), ((401, 333), (402, 334)), ((210, 160), (420, 320))])
def test_frames_are_even_and_large_enough(shape, size):
    assert _frame(np.zeros((*shape, 3), np.uint8)).shape == (*size, 3)


def test_a_missing_package_is_named(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(UsageError, match=r"pip install 'rookery\[video\]'"):
        record(load(run.path), run.config, tmp_path / "film.mp4")


def test_an_odd_suffix_is_refused(run, tmp_path):
    with pytest.raises(UsageError, match=r"a video file ends in \.mp4"):
        record(load(run.path), run.config, tmp_path / "film.gif")


def test_a_folder_that_cannot_be_written_is_a_storage_error(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        record(load(run.path), run.config, tmp_path / "file" / "film.mp4")


def test_a_vector_factory_cannot_be_filmed(run, tmp_path):
    config = replace(run.config, env="rookery.envs.cartpole:CartPoleVector", env_kwargs={"num_envs": 1})
    with pytest.raises((UsageError, EnvError)):
        record(load(run.path), config, tmp_path / "film.mp4")
