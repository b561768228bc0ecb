"""GridNav: mazes are connected, distances and views are those of brute force, rewards and SPL add up, time is slept."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rookery.core.config import AtariConfig, NetConfig
from rookery.envs import maze
from rookery.envs.check import check
from rookery.envs.delay import Delay
from rookery.envs.gridnav import FORWARD, LEFT, RIGHT, STOP, GridNav, GridNavVector
from rookery.envs.lanes import SyncLanes
from rookery.envs.make import make
from rookery.envs.vector import VectorLanes

NAME = "rookery/GridNav-v0"
SHAPES = [{}, {"size": 5, "view": 3, "loops": 1.0, "max_steps": 7}, {"size": 7, "view": 7, "gps": True}]


class Config:
    def __init__(self, env, **kwargs):
        self.env, self.env_kwargs, self.atari, self.net = env, kwargs, AtariConfig(), NetConfig()


def guide(env):
    """The next action on a shortest path: it descends in the distance, and stops at the goal."""
    distance, here = env.maze.distance, (env.row, env.column)
    if distance[here] == 0:
        return STOP
    nearer = [h for h in range(4) if distance[tuple(here + maze.AHEAD[h])] == distance[here] - 1]
    turns = (nearer[0] - env.heading) % 4
    return {0: FORWARD, 1: RIGHT, 2: RIGHT, 3: LEFT}[turns]


def play(env, policy, seed):
    env.reset(seed=seed)
    rewards = []
    while True:
        _, reward, terminated, truncated, info = env.step(policy(env))
        rewards.append(reward)
        if terminated or truncated:
            return rewards, info
        assert not info


@pytest.mark.parametrize("size, loops", [(5, 0.0), (11, 0.0), (11, 0.1), (13, 1.0)])
def test_open_cells_are_connected_and_distances_are_the_shortest(size, loops):
    generator = np.random.default_rng(0)
    for _ in range(5):
        drawn = maze.draw(generator, size, loops)
        cells = [(int(r), int(c)) for r, c in np.argwhere(drawn.distance >= 0)]
        rooms = ((size + 1) // 2) ** 2
        passages = size * size - rooms - ((size - 1) // 2) ** 2
        assert len(cells) >= 2 * rooms - 1 and (len(cells) == 2 * rooms - 1 or loops)  # a tree, or more
        assert len(cells) == rooms + passages or loops < 1
        # Bellman-Ford, without a wave: relax all cells until nothing changes.
        far, before = dict.fromkeys(cells, 10**6) | {drawn.goal: 0}, None
        around = {(r, c): [(r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)] for r, c in cells}
        while far != before:
            before = far
            far = {cell: min(d, *(before.get(near, 10**6) + 1 for near in around[cell])) for cell, d in before.items()}
        assert max(far.values()) < 10**6 and far == {cell: drawn.distance[cell] for cell in cells}
        assert far[drawn.start] >= size // 2 and drawn.heading in range(4)
        border = np.ones_like(drawn.distance, bool)
        border[1:-1, 1:-1] = False
        assert (drawn.distance[border] == maze.WALL).all()


def test_each_episode_has_another_maze_and_the_share_of_loops_is_kept():
    generator = np.random.default_rng(0)
    drawn = [maze.draw(generator, 11, 0.1) for _ in range(300)]
    assert len({each.distance.tobytes() for each in drawn}) == 300
    loops = [np.count_nonzero(each.distance >= 0) - 71 for each in drawn]  # 36 rooms and 35 passages make a tree
    assert abs(np.mean(loops) / (60 - 35) - 0.1) < 0.02  # 60 places between rooms; 5 deviations
    assert len({each.heading for each in drawn}) == 4


@pytest.mark.parametrize("view", [3, 5, 7])
def test_the_view_shows_the_cells_ahead_unless_walls_hide_them(view):
    drawn = maze.draw(np.random.default_rng(3), 7, 0.3)
    views, half = maze.views(drawn.distance, view), view // 2
    open_ = lambda cell: bool((cell >= 1).all() and (cell <= 7).all() and drawn.distance[tuple(cell)] >= 0)  # noqa: E731
    for row, column in np.argwhere(drawn.distance >= 0)[::2]:
        for heading in range(4):
            ahead, right = maze.AHEAD[heading], maze.AHEAD[(heading + 1) % 4]
            for far in range(view):
                for side in range(-half, half + 1):
                    place = lambda f, s: np.array([row, column]) + f * ahead + s * right  # noqa: B023, E731
                    seen = any(all(open_(place(*at)) for at in path) for path in paths(far, side))
                    now = open_(place(far, side))
                    pixels = views[row - 1, column - 1, heading, :, view - 1 - far, half + side]
                    assert pixels.tolist() == [255 * (seen and now), 255 * (seen and not now)]


def paths(far, side):
    """The cells between (0, 0) and (far, side): a walk to the corner of the diagonal first, and one along it first."""
    sign, slants = int(np.sign(side)), min(far, abs(side))
    corner = (far - slants, side - sign * slants)  # from here on the way is diagonal
    for first, then in [(corner, (far, side)), ((slants, sign * slants), (far, side))]:
        f = s = 0
        cells = []
        for goal in (first, then):
            while (f, s) != goal:
                f, s = f + int(np.sign(goal[0] - f)), s + int(np.sign(goal[1] - s))
                cells.append((f, s))
        yield cells[:-1]


@pytest.mark.parametrize("gps", [False, True])
def test_the_goal_is_told_in_the_agents_own_frame_from_where_it_is_or_began(gps):
    env = GridNav(gps=gps)
    for seed in range(20):
        env.reset(seed=seed)
        began = env.row, env.column
        for action in (LEFT, FORWARD, RIGHT, RIGHT):
            goal = env.step(action)[0]["goal"]
            way = np.array(env.maze.goal) - ((env.row, env.column) if gps else began)
            angle = np.arctan2(way[1], -way[0]) - env.heading * np.pi / 2  # from north, clockwise
            far = np.hypot(*way) / 11
            assert np.allclose(goal, [far * np.cos(angle), far * np.sin(angle)], atol=1e-6)


def test_the_shortest_path_is_a_success_with_spl_1_and_rewards_telescope():
    env, turned = GridNav(), 0
    for seed in range(30):
        rewards, info = play(env, guide, seed)
        assert info == {"success": 1.0, "spl": 1.0} and env.walked == env.optimal
        assert sum(rewards) == pytest.approx(env.optimal - 0.01 * len(rewards) + 2.5)
        turned += len(rewards) - env.optimal - 1
    assert turned > 30  # turns cost steps (0.01 each), and no length of the path


def test_a_detour_lowers_spl_and_a_stop_elsewhere_fails():
    env = GridNav()
    for seed in range(10):
        env.reset(seed=seed)
        optimal, walked = env.optimal, 0
        while env.walked < 6:  # to and fro, or round a corner: length that a shortest path does not have
            here = env.row, env.column
            _, reward, *_ = env.step(FORWARD)
            if (env.row, env.column) == here:
                assert reward == pytest.approx(-0.01)  # a wall: nothing moves, and the path does not grow
                env.step(RIGHT)
            else:
                walked += 1
        assert env.walked == walked == 6
        while guide(env) != STOP:
            env.step(guide(env))
        near = env.step(STOP)
        assert near[2] and near[4]["success"] == 1.0
        assert near[4]["spl"] == optimal / max(optimal, env.walked)
        assert near[1] == pytest.approx(2.5 * near[4]["spl"] - 0.01)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(STOP)
    assert terminated and not truncated and reward == -0.01 and info == {"success": 0.0, "spl": 0.0}


def test_one_cell_from_the_goal_counts_and_two_do_not():
    for away, success in [(0, 1.0), (1, 1.0), (2, 0.0)]:
        env = GridNav()
        env.reset(seed=5)
        while env.maze.distance[env.row, env.column] > away:
            env.step(guide(env))
        assert env.step(STOP)[4]["success"] == success


def test_episodes_are_truncated_at_the_limit():
    rewards, info = play(GridNav(size=5), lambda _: LEFT, 0)
    assert len(rewards) == 4 * 25 and info == {"success": 0.0, "spl": 0.0}
    assert len(play(GridNav(max_steps=3), lambda _: LEFT, 0)[0]) == 3


@pytest.mark.parametrize("kwargs", SHAPES)
def test_the_batch_plays_the_episodes_of_single_environments(kwargs):
    lanes = make(Config(NAME, **kwargs), 3)
    singles = SyncLanes(NAME, [gymnasium.make(NAME, **kwargs) for _ in range(3)])
    assert type(lanes) is VectorLanes and type(lanes.env) is GridNavVector and lanes.spec == singles.spec
    assert lanes.spec.obs["view"].kind == "image"
    (a, x), rng, ends = (each.reset([1, 2, 3]) for each in (lanes, singles)), np.random.default_rng(0), 0
    assert all(np.array_equal(a[name], x[name]) for name in x)
    for t in range(300):
        action = rng.choice(4, 3, p=[0.5, 0.24, 0.24, 0.02])
        (a, *b), (x, *y) = lanes.step(action), singles.step(action)
        assert all(np.array_equal(a[name], x[name]) for name in x), t
        assert all(np.array_equal(p, q) for p, q in zip(b, y)), t
        ends += int((b[1] | b[2]).sum())
    assert ends > 5


def test_the_batch_tells_success_and_spl_of_the_lanes_that_ended():
    batch = GridNavVector(2)
    batch.reset(seed=[7, 8])
    single = GridNav()
    single.reset(seed=7)
    while True:
        action = guide(single)
        single.step(action)
        *_, info = batch.step(np.array([action, LEFT]))
        if action == STOP:
            break
        assert not info
    assert info["_success"].tolist() == info["_spl"].tolist() == [True, False]
    assert info["success"][0] == info["spl"][0] == 1.0


def test_it_is_ready_to_train_on():
    report = check(Config(NAME), 400)
    assert report.ok and not report.warnings
    assert report.deterministic and report.convention and report.in_space and report.restorable
    check_env(GridNav(), skip_render_check=True)


def test_a_single_environment_is_restored_in_the_middle_of_an_episode():
    env, other = GridNav(size=5, max_steps=9), GridNav(size=5, max_steps=9)
    env.reset(seed=1)
    env.step(LEFT)
    other.set_state(env.get_state())
    for t in range(30):
        (a, *b), (x, *y) = env.step(t % 3), other.step(t % 3)
        assert all(np.array_equal(a[name], x[name]) for name in x) and b == y
        if b[2]:
            a, x = env.reset()[0], other.reset()[0]
            assert all(np.array_equal(a[name], x[name]) for name in x)


def test_time_is_slept_and_does_not_change_the_game():
    plain, slow = GridNavVector(3), GridNavVector(3, delay=0.01, delay_spread=0.5, slow=10.0)
    slept = []
    slow.delay.sleep = slept.append
    plain.reset(seed=1), slow.reset(seed=1)
    for t in range(50):
        (a, *b, _), (x, *y, _) = (each.step(np.full(3, t % 3)) for each in (plain, slow))
        assert np.array_equal(a["view"], x["view"]) and all(np.array_equal(p, q) for p, q in zip(b, y))
    assert len(slept) == 50 and len(set(slept)) == 50
    single = GridNav(delay=0.01, delay_spread=0.5, slow=10.0)
    single.number_lanes(2)
    assert single.delay.means == slow.delay.means[2:]
    single.delay.sleep = slept.append
    single.reset(seed=1)
    single.step(LEFT)
    assert len(slept) == 51


def test_environments_differ_in_speed_and_the_first_is_the_slow_one():
    delay = Delay(4000, 0.01, 0.5, 10.0)
    slept = []
    delay.sleep = slept.append
    assert np.mean(delay.means[1:]) == pytest.approx(0.01, rel=0.05)
    assert np.std(np.log(delay.means[1:])) == pytest.approx(0.5, rel=0.05)
    delay.wait(range(1, 3)), delay.wait([]), delay.wait([0])
    assert slept[1] == 0.0
    even = Delay(3, 0.01, 0.0, 10.0)
    assert even.means == pytest.approx([0.1, 0.01, 0.01])
    even.sleep = slept.append
    even.wait(range(3)), even.wait([1, 2])  # the slowest lane that steps decides
    assert slept[-2:] == pytest.approx([0.1, 0.01])
    even.number_lanes(8)
    assert even.means == pytest.approx([0.01] * 3)  # lane 0 of this actor is lane 8 of the run


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"size": 10}, "size=10"), ({"size": 3}, "size=3"), ({"view": 4}, "view=4"), ({"loops": 1.5}, "loops=1.5"),
        ({"max_steps": -1}, "max_steps=-1"), ({"delay": -1.0}, "delay=-1.0"), ({"slow": 0.0}, "slow=0.0"),
    ],
)  # fmt: skip
def test_tasks_that_cannot_be_are_refused(kwargs, words):
    for build in (GridNav, lambda **kwargs: GridNavVector(2, **kwargs)):
        with pytest.raises(ValueError, match=words):
            build(**kwargs)
