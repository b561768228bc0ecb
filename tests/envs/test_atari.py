"""Atari on the real emulator: reset rows, stacks, lives, clipping and seeds (spec §11 P9, P11, P12, P14)."""

import numpy as np
import pytest

from rookery.core.config import AtariConfig
from rookery.envs import atari
from rookery.envs.atari import AtariSingle, make_lanes


def lanes_of(game="ALE/Breakout-v5", count=1, training=True, threads=1, **options):
    return make_lanes(game, AtariConfig(**options), count, training, threads)


def play(lanes, seeds, steps, seed=0, actions=None):
    """Columns of random play: obs [T+1, B, ...], reward, terminated, truncated [T, B], score [T, B] or None."""
    rng = np.random.default_rng(seed)
    obs, rest, score = [lanes.reset(seeds)["obs"].copy()], [], []
    for t in range(steps):
        action = rng.integers(lanes.spec.action.choices[0], size=lanes.count) if actions is None else actions[t]
        frame, *row = lanes.step(action)
        obs.append(frame["obs"].copy())
        rest.append([column.copy() for column in row])
        score.append(None if lanes.score is None else lanes.score.copy())
    lanes.close()
    return np.array(obs), *(np.array(column) for column in zip(*rest)), np.array(score)


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left[:4], right[:4]))


def test_the_spec():
    lanes = lanes_of("ALE/Pong-v5", 2)
    leaf = lanes.spec.obs["obs"]
    assert (leaf.shape, leaf.dtype, leaf.kind) == ((4, 84, 84), "uint8", "image") and lanes.spec.action.choices == (6,)
    obs = lanes.reset([1, 2])["obs"]
    assert obs.shape == (2, 4, 84, 84) and obs.dtype == np.uint8
    small = lanes_of("PongNoFrameskip-v4", full_actions=True, stack=1, size=42)
    assert small.spec.obs["obs"].shape == (1, 42, 42) and small.spec.action.choices == (18,)
    assert lanes_of("ALE/MsPacman-v5").spec.id == "ALE/MsPacman-v5"


@pytest.mark.parametrize(
    "game, options",
    [
        ("ALE/Pong-v5", {"max_frames": 2002}),
        ("ALE/Pong-v5", {"max_frames": 402, "stack": 2, "frame_skip": 1}),
        ("ALE/Breakout-v5", {"episodic_life": True}),
    ],
)
def test_every_stack_is_the_one_before_moved_by_a_frame(game, options):
    """So that replay can keep each frame once. First observations of episodes are as they are."""
    lanes = lanes_of(game, 2, **options)
    depth = options.get("stack", 4)
    assert lanes.spec.obs["obs"].stack == depth == lanes.spec.obs["obs"].shape[0]
    obs, _, terminated, truncated, _ = play(lanes, [1, 2], 1200)
    ends, compared = terminated | truncated, 0
    assert ends.sum() > 2
    for lane in range(2):
        first = np.concatenate([[True, False], ends[:-1, lane]])  # row t + 2 of an episode that ended in row t
        for t in np.flatnonzero(~first):
            assert np.array_equal(obs[t, lane][:-1], obs[t - 1, lane][1:]), t  # final observations too
            compared += 1
        if "episodic_life" not in options:  # after a life the game goes on, and so does the stack
            assert not obs[first, lane][:, :-1].any() and obs[first, lane][:, -1].any(axis=(1, 2)).all()
    assert compared > 2200
    assert lanes_of(game, stack=1).spec.obs["obs"].stack == 1


def test_seeds_decide_a_lane_and_nothing_else_does():
    together = play(lanes_of("ALE/Pong-v5", 2), [5, 6], 40)
    assert same(together, play(lanes_of("ALE/Pong-v5", 2, threads=2), [5, 6], 40))
    assert not np.array_equal(together[0][:, 0], together[0][:, 1])
    actions = np.random.default_rng(0).integers(6, size=(40, 2))
    alone = play(lanes_of("ALE/Pong-v5", 1), [6], 40, actions=actions[:, 1:])
    assert np.array_equal(alone[0][:, 0], together[0][:, 1])
    twins = play(lanes_of("ALE/Pong-v5", 2), [6, 6 + atari.SEEDS], 40, actions=actions[:, [1, 1]])  # seeds wrap
    assert np.array_equal(twins[0][:, 0], twins[0][:, 1])


def test_a_truncated_episode_shows_its_last_frames_and_the_reset_row_only_new_ones():
    obs, reward, terminated, truncated, _ = play(lanes_of("ALE/Pong-v5", 2, max_frames=40), [1, 2], 24)
    assert truncated[:, 0].nonzero()[0].tolist() == [9, 20]  # 10 steps of 4 frames, and a row for the reset
    assert not terminated.any() and not truncated[10].any() and not reward[10].any()
    for row, stack in ((0, obs[0]), (11, obs[11])):  # P12: no frame of the old episode, filled with black
        assert not stack[:, :3].any() and stack[:, 3].any(), row
    assert np.array_equal(obs[10][:, :3], obs[9][:, 1:])  # the final observation goes on from the one before
    assert obs[10].reshape(8, -1).any(axis=1).all()


@pytest.mark.parametrize("skip", [1, 4])
def test_the_limit_is_counted_in_emulator_frames(skip):
    truncated = play(lanes_of("ALE/Pong-v5", max_frames=12, frame_skip=skip), [1], 14)[3]
    assert truncated[:, 0].nonzero()[0][0] == 12 // skip - 1


def test_rewards_are_summed_then_clipped_and_the_score_stays_visible():
    game, seeds = "ALE/SpaceInvaders-v5", [1]
    _, clipped, *_, score = play(lanes_of(game), seeds, 150)
    raw = play(lanes_of(game, reward_clip=False), seeds, 150)
    judged = play(lanes_of(game, training=False), seeds, 150)
    assert raw[1].max() >= 5 and clipped.max() == 1
    assert np.array_equal(score, raw[1]) and np.array_equal(clipped, np.clip(raw[1], -1, 1))
    assert np.array_equal(judged[1], raw[1])  # evaluation counts real points
    assert raw[4].tolist() == judged[4].tolist() == [None] * 150


def test_a_lost_life_ends_the_episode_but_not_the_game():
    """P11. With lives as ends, the same buttons pressed play the very same game, over which five lives end."""
    seeds, steps = [4], 170
    actions = np.random.default_rng(1).integers(4, size=(steps, 1))
    lanes, pressed = lanes_of(episodic_life=True), actions.copy()
    step = lanes.step

    def recorded(action):
        pressed[len(seen)] = np.where(lanes._lost, 1, action)  # FIRE, in the row after a lost life
        seen.append(action)
        return step(action)

    seen, lanes.step = [], recorded
    obs, reward, terminated, _, _ = play(lanes, seeds, steps, actions=actions)
    replayed = play(lanes_of(), seeds, steps, actions=pressed)
    assert np.array_equal(replayed[0], obs)
    (over,) = replayed[2].nonzero()[0]  # one whole game
    ends = terminated.nonzero()[0]
    assert (ends <= over).sum() == 5 and over in ends  # four lives, then the game
    assert not reward[ends + 1].any() and not terminated[ends + 1].any()
    # After a lost life the stack goes on, as the game does. After the game it does not.
    assert obs[ends[0] + 2][0, 0].any() and not obs[over + 2][0, :3].any()


def test_lives_do_not_end_episodes_in_evaluation():
    terminated = play(lanes_of(training=False, episodic_life=True), [3], 60)[2]
    assert not terminated.any()


def test_a_game_that_ends_in_the_row_after_a_lost_life_is_reset_at_once():
    terminated = play(lanes_of(episodic_life=True), [3], 40)[2]
    lost = int(terminated[:, 0].argmax())
    assert terminated[lost, 0]
    limit = 4 * (lost + 2)  # the limit falls on the dead row
    obs, reward, terminated, truncated, _ = play(lanes_of(episodic_life=True, max_frames=limit), [3], lost + 6)
    ends = terminated | truncated
    assert ends[lost, 0] and not ends[lost + 1 :].any() and not reward[lost + 1].any()
    assert not obs[lost + 2][0, :3].any() and obs[lost + 2][0, 3].any()  # the dead row's observation is a new game's
    assert obs[lost + 3][0, 2:].reshape(2, -1).any(axis=1).all() and not obs[lost + 3][0, :2].any()  # which goes on


def test_no_ops_are_drawn_from_none_to_the_maximum():
    frames = {}
    for maximum, lanes in ((0, 2), (2, 8)):
        env = atari._native("ALE/Pong-v5", AtariConfig(noop_max=maximum, fire_reset=False), lanes, 1)
        frames[maximum] = set(env.reset(seed=np.arange(lanes))[1]["episode_frame_number"].tolist())
        env.close()
    assert frames == {0: {0}, 2: {0, 1, 2}}


def test_sticky_actions_are_off_unless_asked_for():
    plain, sticky, again = (play(lanes_of("ALE/Pong-v5", sticky=p), [1], 30) for p in (0.0, 0.5, 0.5))
    assert same(sticky, again) and not same(plain, sticky)
    assert AtariConfig().sticky == 0.0


def test_the_single_game_plays_as_evaluation_does_and_can_be_drawn():
    config = AtariConfig(max_frames=80)
    env = AtariSingle("ALE/Breakout-v5", config, render_mode="rgb_array")
    obs, reward, terminated, truncated, _ = play(make_lanes("ALE/Breakout-v5", config, 1, False, 1), [9], 50)
    rng = np.random.default_rng(0)
    frame, info = env.reset(seed=9)
    assert np.array_equal(frame, obs[0][0]) and info["lives"] == 5
    over, pictures = False, []
    for t in range(50):
        action = rng.integers(4, size=1)[0]
        if over:
            (frame, _), row = env.reset(), (0.0, False, False)
        else:
            frame, *row, _ = env.step(action)
        over = row[1] or row[2]
        assert np.array_equal(frame, obs[t + 1][0]), t
        assert tuple(row) == (reward[t, 0], terminated[t, 0], truncated[t, 0]), t
        pictures.append(env.render())
    assert truncated.sum() == 2 and over is False
    assert all(picture.shape == (210, 160, 3) and picture.dtype == np.uint8 for picture in pictures)
    assert len({picture.tobytes() for picture in pictures}) > 20 and env.metadata["render_fps"] == 15
    # The picture shows the game that is played: its brightness, row by row, follows the small frame's.
    grey = pictures[-1].mean(axis=2).reshape(42, 5, 160).mean(axis=(1, 2))
    small = obs[-1][0, -1].reshape(42, 2, 84).mean(axis=(1, 2))
    assert np.corrcoef(grey, small)[0, 1] > 0.95
    env.close()
