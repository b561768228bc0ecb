"""`predict` and `explain` of every algorithm, with and without memory: networks as they start, nothing is trained."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rookery.algorithms.registry import build_algorithm
from rookery.core.errors import UsageError
from rookery.core.seeding import seed_of
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.ops.rescale import rescaled
from rookery.play.policy import Policy
from rookery.recipes import RECIPES
from rookery.storage.checkpoint import Checkpoint

VECTOR = {"obs": Leaf((3,), "float32", "vector")}
DISCRETE = EnvSpec("discrete", VECTOR, ActionSpec("discrete", choices=(4,), starts=(2,)))
BOX = EnvSpec("box", VECTOR, ActionSpec("box", size=4, low=(-3.0,) * 4, high=(1.0,) * 4, box_shape=(2, 2)))
MASK = {"action_mask": Leaf((4,), "bool", "mask")}
MASKED = EnvSpec("masked", VECTOR | MASK, ActionSpec("discrete", choices=(4,), starts=(0,)), mask_from="observation")
FRAMES = EnvSpec("frames", {"obs": Leaf((4, 10, 10), "uint8", "image", stack=4)}, DISCRETE.action)
POLICIES, VALUES, BOXES = ("ppo", "a2c", "impala", "appo"), ("dqn", "c51", "rainbow", "r2d2"), ("ddpg", "d4pg")
CASES = [(name, DISCRETE) for name in (*POLICIES, *VALUES)] + [(name, BOX) for name in ("ppo", *BOXES)]
OBS = np.random.default_rng(0).normal(size=(3, 5, 3)).astype(np.float32)  # [T, B, 3]


def fresh(recipe, spec, core="none", **fields):
    preset = RECIPES[recipe].presets[-1].name
    net = {"core": core, "core_size": 8, "hidden": (8,), "torso": "auto"} | fields.pop("net", {})
    config = RECIPES[recipe].build(spec.id, lambda: spec, preset, net=net, actors=1, envs_per_actor=2, **fields)
    torch.manual_seed(1)
    nets = build_algorithm(config, spec).nets()
    noise = torch.Generator().manual_seed(2)
    tensors = {
        f"nets/{name}": x + 0.3 * torch.randn(x.shape, generator=noise) if x.is_floating_point() else x
        for name, x in nets.state_dict().items()
        if "moments" not in name
    } | {f"nets/{name}": x for name, x in nets.state_dict().items() if "moments" in name}
    return Policy(config, spec, Checkpoint(Path("step-0"), 0, tensors, {}))


@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
@pytest.mark.parametrize("recipe, spec", CASES, ids=lambda x: getattr(x, "id", x))
def test_a_batch_is_its_rows_one_by_one_and_a_state_is_forgotten_where_an_episode_begins(recipe, spec, core):
    policy = fresh(recipe, spec, core if recipe != "r2d2" or core != "none" else "lstm")
    together, alone = None, [None] * 5
    for t, obs in enumerate(OBS):
        starts = [t == 2 and lane == 1 for lane in range(5)]
        found = policy.explain(obs, together, episode_start=starts)
        together, rows = found.state, []
        for lane in range(5):
            rows.append(policy.explain(obs[lane], None if starts[lane] else alone[lane]))
            alone[lane] = rows[-1].state
        assert np.allclose(found.action, [row.action for row in rows], atol=1e-5)
        for name in found.has:
            assert np.allclose(found.quantities[name], [row.quantities[name] for row in rows], 1e-3, 1e-3), name
    assert (together is None) == (core == "none" and recipe != "r2d2" and not policy.initial_state(1))
    assert found.value.shape == (5,) and np.isfinite(found.value).all()
    if together is not None and policy.algorithm.recurrent:
        assert not np.allclose(found.value, policy.explain(OBS[-1]).value), "the state makes no difference"


@pytest.mark.parametrize("recipe, spec", CASES, ids=lambda x: getattr(x, "id", x))
def test_actions_are_the_environments_own_and_draws_repeat(recipe, spec):
    policy = fresh(recipe, spec)
    obs = np.repeat(OBS[0], 40, axis=0)
    policy.seed(3)
    drawn = [policy.predict(obs, deterministic=False)[0] for _ in range(2)]
    policy.seed(3)
    again = policy.predict(obs, deterministic=False)[0]
    given = torch.Generator().manual_seed(seed_of(3, "predict"))
    assert np.array_equal(drawn[0], again) and not np.array_equal(*drawn)
    assert np.array_equal(policy.predict(obs, deterministic=False, generator=given)[0], again)
    if spec is BOX:
        assert again.shape == (200, 2, 2) and again.dtype == np.float32 and again.min() >= -3 and again.max() <= 1
        assert policy.predict(OBS[0, 0])[0].shape == (2, 2)
    else:
        assert set(again) == {2, 3, 4, 5} and isinstance(policy.predict(OBS[0, 0])[0], int)


@pytest.mark.parametrize("recipe, spec", CASES, ids=lambda x: getattr(x, "id", x))
def test_what_an_algorithm_knows(recipe, spec):
    found = fresh(recipe, spec).explain(OBS[0])
    if recipe in POLICIES:
        assert found.has == ("logp", "value") and found.logp.shape == (5,)
        with pytest.raises(UsageError, match=r"has no q; it has logp, value"):
            _ = found.q
    else:
        assert found.has == ("q", "value")
        with pytest.raises(UsageError, match=r"has no logp; it has q, value"):
            _ = found.logp
        if recipe in VALUES:
            assert np.array_equal(found.q.argmax(1) + 2, found.action) and np.array_equal(found.q.max(1), found.value)
        else:
            assert found.q.shape == (5,) and np.allclose(found.q, found.value)  # it took the best action it knows


def test_logp_is_the_probability_with_which_actions_are_drawn():
    policy = fresh("ppo", DISCRETE)
    found = policy.explain(np.repeat(OBS[0, :1], 20_000, axis=0), deterministic=False)
    actions, first, counts = np.unique(found.action, return_index=True, return_counts=True)
    assert np.allclose(np.exp(found.logp[first]), counts / 20_000, atol=0.015) and len(actions) == 4


def test_action_values_are_in_units_of_the_return():
    """R2D2 learns them on a scale of square roots."""
    learnt, told = (fresh("dqn", DISCRETE, algo={"rescale": on}).explain(OBS[0]).q for on in (False, True))
    assert np.allclose(rescaled(torch.tensor(told)), learnt, 1e-4, 1e-5) and not np.allclose(told, learnt, 0.1)


@pytest.mark.parametrize("recipe", ["ppo", "dqn"])
def test_masks_come_in_the_observation_or_beside_it(recipe):
    policy = fresh(recipe, MASKED)
    legal = np.eye(4, dtype=np.int8)[[3, 1, 0, 2, 2]]
    for form in (legal, torch.tensor(legal), legal.tolist()):
        assert policy.predict({"obs": OBS[0], "action_mask": form})[0].tolist() == [3, 1, 0, 2, 2]
        assert policy.predict(OBS[0], action_mask=form)[0].tolist() == [3, 1, 0, 2, 2]
        assert policy.predict({"obs": OBS[0, 0], "action_mask": form[0]})[0] == 3
        assert policy.predict(OBS[0, 1], action_mask=form[1], deterministic=False)[0] == 1
    with pytest.raises(UsageError, match="reads 'action_mask' of an observation, and was given none"):
        policy.predict(OBS[0])
    with pytest.raises(UsageError, match=r"an action_mask of shape \(1, 2\), expected \(1, 4\)"):
        policy.predict(OBS[0, 0], action_mask=[True, False])
    found = policy.explain(OBS[0], action_mask=legal)
    if recipe == "dqn":
        assert np.array_equal(found.value, found.q[np.arange(5), [3, 1, 0, 2, 2]])
    else:
        assert np.allclose(found.logp, 0, atol=1e-6)


def test_the_last_action_and_reward_are_fed_to_every_row_of_a_batch():
    policy = fresh("ppo", BOX, "gru", net={"feed_last": True})
    together, alone, rewards = None, [None] * 5, np.linspace(-1, 1, 5)
    for obs in OBS:
        action, together = policy.predict(obs, together, reward=rewards)
        singles = [policy.predict(each, s, reward=r) for each, s, r in zip(obs, alone, rewards)]
        alone = [state for _, state in singles]
        assert np.allclose(action, [each for each, _ in singles], atol=1e-5)
    begun = policy.predict(OBS[0], together, episode_start=np.ones(5), reward=rewards)[0]
    assert np.allclose(begun, policy.predict(OBS[0])[0])
    with pytest.raises(UsageError, match="the state has 5 rows, and there are 2 observations"):
        policy.predict(OBS[0, :2], together)


def test_frames_are_not_read_as_fractions():
    policy = fresh("ppo", FRAMES)
    frames = np.random.default_rng(0).integers(0, 256, (2, 4, 10, 10))
    assert policy.predict(frames)[0].tolist() == policy.predict(frames.astype(np.uint8))[0].tolist()
    with pytest.raises(UsageError, match=r"'obs' has fractions; the policy has learnt from integers \(uint8\)"):
        policy.predict(frames / 255)
    with pytest.raises(UsageError, match="has numbers outside 0 to 255"):
        policy.predict(frames - 1)
