"""Actors: every row where it belongs, every step counted once, every recurrent state before its row."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from support_lanes import (
    BOX,
    DISCRETE,
    MULTI,
    SMALL,
    ScriptedLanes,
    build,
    columns,
    frozen,
    reward_of,
)

from rookery.algorithms.ppo import PPO, PPOConfig
from rookery.core import tree
from rookery.core.config import NetConfig
from rookery.core.errors import EnvError
from rookery.core.unroll import as_unroll, empty_unroll, unroll_shapes
from rookery.nets import build as nets_build
from rookery.roles.actor import Actor
from rookery.storage.codec import decode_tree, encode_tree

T, B = SMALL.unroll, 4
CORES = [NetConfig(hidden=(8,), core=core, core_size=5, core_layers=n) for core in ("gru", "lstm") for n in (1, 2)]
CORE_IDS = [f"{net.core}{net.core_layers}" for net in CORES]


@pytest.mark.parametrize("action", [DISCRETE, MULTI, BOX], ids=lambda spec: spec.kind)
def test_every_row_is_where_the_script_says(action):
    """P42, P4, P2: observation, action, reward and flags of one row belong together, over many unrolls."""
    rig = build(lambda: ScriptedLanes(action=action))
    actor, out = rig.actors[0], rig.buffers[0]
    unrolls = 12
    expected = columns(unrolls * T + 1)
    steps, dead_first, dead_last, ends_last = 0, 0, 0, 0
    for k in range(unrolls):
        report = actor.unroll(out, version=40 + k)
        rows = expected[k * T : (k + 1) * T + 1]
        lane = np.broadcast_to(np.arange(B), (T + 1, B))
        np.testing.assert_array_equal(out.obs["obs"], np.stack([lane, rows[..., 0], rows[..., 1]], -1))
        np.testing.assert_array_equal(out.live, rows[:-1, :, 2].astype(bool))
        np.testing.assert_array_equal(out.terminated, rows[:-1, :, 3].astype(bool))
        np.testing.assert_array_equal(out.truncated, rows[:-1, :, 4].astype(bool))
        np.testing.assert_array_equal(out.action, np.stack(actor.lanes.actions[-T:]).astype(action.dtype))
        paid = np.stack([reward_of(out.obs["obs"][t], out.action[t]) for t in range(T)])
        np.testing.assert_array_equal(out.reward, np.where(out.live, paid, 0))
        assert (out.version == 40 + k).all() and out.lane.tolist() == list(range(B))
        assert report.steps == out.live.sum()
        steps += report.steps
        dead_first, dead_last = dead_first + (~out.live[0]).sum(), dead_last + (~out.live[-1]).sum()
        ends_last += (out.terminated | out.truncated)[-1].sum()
    assert steps == actor.lanes.taken
    assert dead_first and dead_last and ends_last, "the script must put dead rows at both ends of an unroll"


def test_the_last_row_of_observations_is_the_first_of_the_next_unroll():
    rig = build()
    before = None
    for _ in range(8):
        rig.actors[0].unroll(rig.buffers[0], 0)
        now = rig.buffers[0].obs["obs"]
        if before is not None:
            np.testing.assert_array_equal(now[0], before)
        before = now[-1].copy()


def test_no_transition_mixes_two_episodes():
    """P4: a live row and its successor are consecutive steps of one episode; only dead rows lead into the next."""
    rig = build()
    for _ in range(10):
        rig.actors[0].unroll(rig.buffers[0], 0)
        now, after = rig.buffers[0].obs["obs"][:-1], rig.buffers[0].obs["obs"][1:]
        live = rig.buffers[0].live
        np.testing.assert_array_equal(after[live], now[live] + [0, 0, 1])
        np.testing.assert_array_equal(after[~live][:, 1:], np.stack([now[~live][:, 1] + 1, 0 * now[~live][:, 1]], -1))


@pytest.mark.parametrize("unroll", [1, 2, 6, 40])
def test_episodes_are_told_once_with_the_return_and_length_the_environment_saw(unroll):
    rig = build(config=dataclasses.replace(SMALL, unroll=unroll, minibatches=1))
    lanes, told, steps = rig.actors[0].lanes, [], 0
    for _ in range(120 // unroll):
        report = rig.actors[0].unroll(rig.buffers[0], 0)
        told += [(e.lane, e.total, e.length) for e in report.episodes]
        steps += report.steps
        assert steps == lanes.taken
    assert sorted(told) == sorted(lanes.finished) and len(told) > 40
    for lane in range(B):  # and in order
        assert [e for e in told if e[0] == lane] == [e for e in lanes.finished if e[0] == lane]


def test_a_score_is_what_episodes_are_told_in_and_the_reward_is_what_trains():
    plain, scored = build(), build(lambda: ScriptedLanes(scored=True))
    for _ in range(5):
        a, b = (rig.actors[0].unroll(rig.buffers[0], 0) for rig in (plain, scored))
        np.testing.assert_array_equal(plain.buffers[0].reward, scored.buffers[0].reward)
        assert [e.total * 10 for e in a.episodes] == [e.total for e in b.episodes]


@pytest.mark.parametrize("net", [NetConfig(hidden=(8,)), CORES[3]], ids=["ff", "lstm2"])
def test_everything_in_the_given_memory_is_written_and_nothing_in_it_is_read(net):
    clean, dirty = build(net=net), build(net=net)
    for _ in range(4):
        tree.map_fields(dirty.buffers[0], lambda x: x.fill(True if x.dtype == bool else -42))
        clean.actors[0].unroll(clean.buffers[0], 3)
        dirty.actors[0].unroll(dirty.buffers[0], 3)
        for field in dataclasses.fields(clean.buffers[0]):
            a, b = (tree.leaves(getattr(rig.buffers[0], field.name)) for rig in (clean, dirty))
            for x, y in zip(a, b, strict=True):
                np.testing.assert_array_equal(x, y, err_msg=field.name)


def test_tick_is_called_before_each_vector_step():
    rig = build()
    seen = []
    rig.actors[0].unroll(rig.buffers[0], 0, lambda row: seen.append((row, len(rig.actors[0].lanes.actions))))
    assert seen == [(row, row) for row in range(T)]


# Recurrence


def replayed(rig, out) -> torch.Tensor:
    """Log-probabilities of an unroll through the training path: chunk by chunk, from the stored states."""
    chunk, nets = rig.algorithm.plan().chunk, rig.learner.nets
    logp = []
    for c in range(T // chunk):
        rows = slice(c * chunk, (c + 1) * chunk)
        obs = {"obs": torch.from_numpy(out.obs["obs"][rows].copy())}
        state = tree.map(lambda x: torch.from_numpy(x[c].copy()), out.state0)  # noqa: B023
        live = torch.from_numpy(out.live[rows].copy())
        reset = torch.cat([torch.zeros(1, B, dtype=torch.bool), ~live[:-1]])
        params, *_ = nets_build.policy_value_sequence(nets, obs, state, reset)
        logp.append(nets["policy"].logp_entropy(params, torch.from_numpy(out.action[rows].copy()))[0])
    return torch.cat(logp).detach()


@pytest.mark.parametrize("chunk", [1, 2, 3, 6])
@pytest.mark.parametrize("net", CORES, ids=CORE_IDS)
def test_a_recorded_chunk_replayed_gives_the_recorded_log_probabilities(net, chunk):
    """P27, P43: resets in the middle, at chunk starts, in an unroll's first and last row, in every lane."""
    rig = build(config=dataclasses.replace(SMALL, chunk=chunk), net=net)
    seen = set()
    for _ in range(8):
        rig.actors[0].unroll(rig.buffers[0], 0)
        out = rig.buffers[0]
        np.testing.assert_allclose(replayed(rig, out).numpy(), out.logp, rtol=0, atol=1e-6)
        seen |= set(np.flatnonzero((~out.live).any(1)).tolist())
    assert seen == set(range(T)), "the script must reset in every row of an unroll"


@pytest.mark.parametrize("net", CORES, ids=CORE_IDS)
def test_log_probabilities_are_those_of_fresh_episodes(net):
    """P25 end to end: an episode's rows do not depend on what the lane did before it."""
    rig = build(net=net)
    nets, body = rig.learner.nets, rig.learner.nets["body"]
    for _ in range(6):
        rig.actors[0].unroll(rig.buffers[0], 0)
        out = rig.buffers[0]
        for lane, row in np.argwhere(~out.live[:-1].T):
            stop = next((t for t in range(row + 1, T) if (out.terminated | out.truncated)[t, lane]), T - 1)
            state = body.initial(1)
            for t in range(row + 1, stop + 1):
                obs = {"obs": torch.from_numpy(out.obs["obs"][t, lane : lane + 1].copy())}
                features, state = body.step(obs, state)
                params = nets["policy"](features)
                logp, _ = nets["policy"].logp_entropy(params, torch.from_numpy(out.action[t, lane : lane + 1].copy()))
                assert abs(logp.item() - out.logp[t, lane]) < 1e-6


def test_the_state_of_a_chunk_is_the_one_before_its_first_row():
    """P43: the very first stored state is zero; each later one continues, unless an episode began."""
    rig = build(net=CORES[3])
    rig.actors[0].unroll(rig.buffers[0], 0)
    first = frozen(rig.buffers[0])
    assert not first.state0["h"][0].any() and not first.state0["c"][0].any()
    assert first.state0["h"].shape == (2, B, 2, 5)
    for _ in range(6):
        rig.actors[0].unroll(rig.buffers[0], 0)
        out = rig.buffers[0]
        fresh = out.obs["obs"][::3][:2, :, 2] == 0
        for c, lane in np.argwhere(fresh):
            assert not out.state0["h"][c, lane].any()
        for c, lane in np.argwhere(~fresh):
            assert out.state0["h"][c, lane].all() and out.state0["c"][c, lane].all()


# Seeds and streams


def uniform(rig) -> None:
    with torch.no_grad():
        for parameter in rig.learner.nets["policy"].parameters():
            parameter.zero_()


@pytest.mark.parametrize("action", [DISCRETE, MULTI, BOX], ids=lambda spec: spec.kind)
def test_action_streams_differ_between_actors_and_repeat_with_the_seed(action):
    """P93: the first 64 actions from equal logits."""

    def streams(seed: int) -> list[np.ndarray]:
        config = dataclasses.replace(SMALL, unroll=16, chunk=16)
        rig = build(lambda: ScriptedLanes(action=action), config=config, actors=3, seed=seed)
        uniform(rig)
        for actor, buffer in zip(rig.actors, rig.buffers):
            actor.unroll(buffer, 0)
        return [buffer.action.copy() for buffer in rig.buffers]

    one, again, other = streams(5), streams(5), streams(6)
    for a, b in zip(one, again):
        np.testing.assert_array_equal(a, b)
    for a, b in itertools.combinations([*one, *other], 2):
        assert a[..., 0].size == 64 if action.kind != "discrete" else a.size == 64
        assert (a != b).any()


def test_the_stream_of_an_unroll_depends_on_its_number_and_not_on_what_came_before():
    """A replaced worker that starts at unroll 3 draws what the first one would have drawn."""
    whole, late = build(lambda: ScriptedLanes(lengths=((10**6,),))), build(lambda: ScriptedLanes(lengths=((10**6,),)))
    for rig in (whole, late):
        uniform(rig)
    for _ in range(4):
        whole.actors[0].unroll(whole.buffers[0], 0)
    late.actors[0].sequence = 3
    late.actors[0].unroll(late.buffers[0], 0)
    np.testing.assert_array_equal(whole.buffers[0].action, late.buffers[0].action)


def test_environment_seeds_are_unique_over_the_whole_run_and_its_restarts():
    """P94: 8 actors of 32 environments, 3 lives each."""
    spec = ScriptedLanes().spec
    algorithm = PPO(PPOConfig(unroll=4, minibatches=1), NetConfig(), spec, 256)
    nets, seeds = algorithm.nets(), []
    for index in range(8):
        lanes = ScriptedLanes(count=32)
        actor = Actor(algorithm, nets, lanes, 1, index)
        for life in ("0.0", "0.1", "7.0"):
            actor.reset(life)
        seeds += [seed for call in lanes.seeds for seed in call]
    assert len(seeds) == 8 * 32 * 3 == len(set(seeds))
    assert all(0 <= seed < 2**31 for seed in seeds)


# Snapshots


@pytest.mark.parametrize("net", [NetConfig(hidden=(8,)), *CORES[:4:3]], ids=["ff", "gru1", "lstm2"])
@pytest.mark.parametrize("through_file", [False, True])
def test_an_actor_goes_on_from_a_snapshot_exactly(net, through_file):
    rig = build(net=net)
    actor, out = rig.actors[0], rig.buffers[0]
    for _ in range(3):
        actor.unroll(out, 0)
    snapshot = actor.snapshot()
    if through_file:
        snapshot = decode_tree(*encode_tree(snapshot))
    expected = []
    for _ in range(3):
        report = actor.unroll(out, 0)
        expected.append((frozen(out), report.steps, report.episodes))

    other = Actor(rig.algorithm, rig.learner.nets, ScriptedLanes(), seed=7, index=0)
    other.restore(snapshot)
    for then, steps, episodes in expected:
        report = other.unroll(out, 0)
        assert (report.steps, report.episodes) == (steps, episodes)
        for field in dataclasses.fields(out):
            for x, y in zip(tree.leaves(getattr(then, field.name)), tree.leaves(getattr(out, field.name)), strict=True):
                np.testing.assert_array_equal(x, y, err_msg=field.name)


def test_faults_after_a_restore_have_the_right_address():
    rig = build()
    for _ in range(2):
        rig.actors[0].unroll(rig.buffers[0], 0)
    snapshot = decode_tree(*encode_tree(rig.actors[0].snapshot()))
    other = Actor(rig.algorithm, rig.learner.nets, ScriptedLanes(faults={(2, 0, 12): "raise"}), seed=7, index=0)
    other.restore(snapshot)
    with pytest.raises(EnvError, match=r"lane 2, episode 0, step 12\)"):
        other.unroll(rig.buffers[0], 0)


def test_there_is_no_snapshot_of_environments_that_have_none():
    rig = build(lambda: ScriptedLanes(restorable=False))
    rig.actors[0].unroll(rig.buffers[0], 0)
    assert rig.actors[0].snapshot() is None


# Memory


def test_shapes_of_an_unroll_are_those_of_the_contract():
    algorithm = PPO(SMALL, CORES[3], ScriptedLanes(action=MULTI).spec, B)
    state = {"h": torch.zeros(1, 2, 5), "c": torch.zeros(1, 2, 5)}
    shapes = unroll_shapes(algorithm.spec, algorithm.plan(), B, state)
    assert shapes == {
        "obs/obs": ((T + 1, B, 3), "float32"), "action": ((T, B, 2), "int64"), "reward": ((T, B), "float32"),
        "terminated": ((T, B), "bool"), "truncated": ((T, B), "bool"), "live": ((T, B), "bool"),
        "logp": ((T, B), "float32"), "state0/h": ((2, B, 2, 5), "float32"), "state0/c": ((2, B, 2, 5), "float32"),
        "version": ((B,), "int64"), "lane": ((B,), "int64"), "extras/value": ((T, B), "float32"),
    }  # fmt: skip


def test_an_unroll_is_a_view_of_the_arrays_it_was_given():
    shapes = unroll_shapes(ScriptedLanes().spec, PPO(SMALL, NetConfig(), ScriptedLanes().spec, B).plan(), B, {})
    arrays = {path: np.zeros(shape, dtype) for path, (shape, dtype) in shapes.items()}
    unroll = as_unroll(arrays)
    assert unroll.obs["obs"] is arrays["obs/obs"] and unroll.reward is arrays["reward"]
    assert unroll.state0 == {} and unroll.extras == {}
    assert empty_unroll(shapes).obs["obs"].shape == (T + 1, B, 3)


def test_the_state_that_is_stored_is_what_the_core_returns():
    """Layers and leaves keep their places on the way through numpy: 2 layers, every number different."""
    rig = build(net=CORES[3])
    body = rig.learner.nets["body"]
    rig.actors[0].unroll(rig.buffers[0], 0)
    obs = {"obs": torch.from_numpy(rig.buffers[0].obs["obs"].copy())}
    state = body.initial(B)
    with torch.no_grad():
        for t in range(3):
            _, state = body.step({"obs": obs["obs"][t]}, state)
            keep = torch.from_numpy(rig.buffers[0].live[t].copy()).view(-1, 1, 1)
            state = {leaf: value * keep for leaf, value in state.items()}
    for leaf in ("h", "c"):
        np.testing.assert_allclose(rig.buffers[0].state0[leaf][1], state[leaf].numpy(), atol=1e-6)
