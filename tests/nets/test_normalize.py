"""Running statistics: pooled exactly, changed by `update` only, and safe before they know anything."""

import numpy as np
import pytest
import torch
from support_ranks import agreed, ranks, together

from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.nets.normalize import ObsNormalizer, RewardScaler

SPEC = EnvSpec(
    "toy",
    {
        "a.b": Leaf((3,), "float32", "vector"),
        "img": Leaf((4, 8, 8), "uint8", "image"),
        "n": Leaf((), "int64", "discrete", 5),
        "g": Leaf((2, 2), "float32", "vector"),
    },
    ActionSpec("discrete", choices=(2,)),
)


def observations(*lead: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "a.b": torch.randn(*lead, 3, generator=g) * 5 + 100,
        "img": torch.randint(0, 256, (*lead, 4, 8, 8), dtype=torch.uint8, generator=g),
        "n": torch.randint(0, 5, lead, generator=g),
        "g": torch.randn(*lead, 2, 2, generator=g) * 0.01,
    }


def test_identity_before_the_first_update_and_when_disabled():
    obs = observations(6)
    obs["a.b"][0, 0] = 1e6  # beyond any clip
    for normalizer in (ObsNormalizer(SPEC, True), ObsNormalizer(SPEC, False)):
        out = normalizer(obs)
        assert out.keys() == obs.keys()
        assert all(torch.equal(out[key], obs[key]) for key in obs)
    off = ObsNormalizer(SPEC, False)
    off.update({key: x[None] for key, x in obs.items()}, torch.ones(1, 6, dtype=torch.bool))
    assert not list(off.buffers()) and not list(off.parameters()) and off.published() == []


def test_vectors_become_standard_and_the_rest_passes():
    normalizer, obs = ObsNormalizer(SPEC, True), observations(50, 8)
    normalizer.update(obs, torch.ones(50, 8, dtype=torch.bool))
    out = normalizer({key: x.flatten(0, 1) for key, x in obs.items()})
    for key in ("a.b", "g"):
        torch.testing.assert_close(out[key].mean(0), torch.zeros(SPEC.obs[key].shape), rtol=0, atol=1e-4)
        torch.testing.assert_close(out[key].std(0, unbiased=False), torch.ones(SPEC.obs[key].shape), rtol=0, atol=1e-3)
    assert out["img"].dtype == torch.uint8 and torch.equal(out["n"], obs["n"].flatten())
    far = normalizer({**{key: x[0] for key, x in obs.items()}, "a.b": torch.full((8, 3), 1e9)})
    assert far["a.b"].eq(10).all()


def test_batches_merge_to_the_moments_of_all_live_rows():
    normalizer = ObsNormalizer(SPEC, True)
    rows = []
    for seed in range(4):
        obs = observations(5, 3, seed=seed)
        live = torch.rand(5, 3, generator=torch.Generator().manual_seed(seed)) < 0.7
        obs["a.b"][~live] = torch.nan  # what is not live may be anything
        normalizer.update(obs, live)
        rows.append(obs["a.b"][live].double().numpy())
    rows = np.concatenate(rows)
    running = normalizer.leaves[0].running
    assert running.count == len(rows)
    np.testing.assert_allclose(running.mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(running.m2 / running.count, rows.var(0), rtol=1e-9)


def test_two_ranks_hold_the_statistics_of_the_pool():  # P33
    parts = [observations(4, 2, seed=1), observations(9, 2, seed=2)]  # unequal on purpose
    lives = [torch.ones(4, 2, dtype=torch.bool), torch.rand(9, 2) < 0.5]
    group = ranks(2)
    found = [ObsNormalizer(SPEC, True) for _ in parts]
    alone = ObsNormalizer(SPEC, True)
    for shift in (0, 3):  # the second time the running mean is not 0
        parts = [{key: obs[key] + shift if key in ("a.b", "g") else obs[key] for key in obs} for obs in parts]
        agreed(together(group, lambda r, parts=parts: found[r].update(parts[r], lives[r], group[r])))
        pool = {key: torch.cat([part[key] for part in parts]) for key in SPEC.obs}
        alone.update(pool, torch.cat(lives))
        for normalizer in found:
            for ours, theirs in zip(normalizer.buffers(), alone.buffers()):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert [len(rank.calls) for rank in group] == [2, 2], "one collective for all leaves"


def test_an_update_without_live_rows_changes_nothing():
    normalizer, obs = ObsNormalizer(SPEC, True), observations(3, 2)
    normalizer.update(obs, torch.zeros(3, 2, dtype=torch.bool))
    out = normalizer(obs)
    assert torch.equal(out["a.b"], obs["a.b"])


def test_forward_never_learns_and_published_buffers_are_enough():
    learner, actor, obs = ObsNormalizer(SPEC, True), ObsNormalizer(SPEC, True), observations(20, 2)
    learner.update(obs, torch.ones(20, 2, dtype=torch.bool))
    before = [buffer.clone() for buffer in learner.buffers()]
    for _ in range(3):
        learner(observations(4, seed=7))
    assert all(torch.equal(a, b) for a, b in zip(before, learner.buffers()))
    assert all(buffer.dtype == torch.float32 for buffer in learner.published())
    for mine, new in zip(actor.published(), learner.published()):
        mine.copy_(new)
    fresh = observations(4, seed=8)
    assert torch.equal(actor(fresh)["a.b"], learner(fresh)["a.b"])


def scale_naively(reward, ends, live, gamma):
    """Every return so far in one list, plain numpy."""
    returns, out = [], []
    running = np.zeros(reward.shape[1])
    for t in range(len(reward)):
        for b in range(reward.shape[1]):
            if live[t, b]:
                running[b] = gamma * running[b] + reward[t, b]
                returns.append(running[b])
            if ends[t, b]:
                running[b] = 0
    deviation = np.sqrt(np.var(returns) + 1e-8)
    out = np.clip(reward / deviation, -10, 10)
    return out, running, returns


def unroll(T, B, seed):
    g = torch.Generator().manual_seed(seed)
    ends = torch.rand(T, B, generator=g) < 0.2
    live = torch.ones(T, B, dtype=torch.bool)
    live[1:] = ~ends[:-1]
    ends &= live
    reward = torch.where(live, torch.randn(T, B, generator=g) * 7 + 1, 0.0)
    return reward, ends, live


def test_reward_scaler_equals_the_naive_scan():
    reward, ends, live = unroll(30, 4, 3)
    scaler = RewardScaler(6, 0.9, True)
    lane = torch.tensor([5, 0, 3, 1])
    ours = scaler(reward, ends, live, lane)
    theirs, running, returns = scale_naively(reward.double().numpy(), ends.numpy(), live.numpy(), 0.9)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_allclose(scaler.returns[lane], running, rtol=1e-9, atol=1e-12)
    assert scaler.running.count == len(returns) and not scaler.returns[[2, 4]].any()


def test_reward_scaler_continues_across_calls():
    reward, ends, live = unroll(30, 4, 4)
    whole, parts = RewardScaler(4, 0.95, True), RewardScaler(4, 0.95, True)
    lane = torch.arange(4)
    whole(reward, ends, live, lane)
    for part in (slice(0, 13), slice(13, 30)):
        last = parts(reward[part], ends[part], live[part], lane)
    torch.testing.assert_close(parts.returns, whole.returns)
    torch.testing.assert_close(parts.running.m2, whole.running.m2)
    deviation = (whole.running.m2 / whole.running.count).sqrt()
    torch.testing.assert_close(last, (reward[13:] / deviation.float()).clamp(-10, 10))


def test_reward_scaler_pools_over_ranks_and_passes_when_disabled():
    reward, ends, live = unroll(10, 4, 5)
    lane = torch.arange(4)
    assert RewardScaler(4, 0.9, False)(reward, ends, live, lane) is reward
    group, parts = ranks(2), [slice(0, 1), slice(1, 4)]

    def scaled(rank: int) -> torch.Tensor:
        own = parts[rank]
        return RewardScaler(4, 0.9, True)(reward[:, own], ends[:, own], live[:, own], lane[own], group[rank])

    whole = RewardScaler(4, 0.9, True)(reward, ends, live, lane)
    for own, ours in zip(parts, agreed(together(group, scaled))):
        torch.testing.assert_close(ours, whole[:, own])


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_rewards_stay_finite(value):
    scaler = RewardScaler(2, 0.0, True)
    flags = torch.zeros(5, 2, dtype=torch.bool)
    out = scaler(torch.full((5, 2), value), flags, ~flags, torch.arange(2))
    assert out.isfinite().all() and out.abs().max() <= 10


# A lane several times in one batch, and unrolls that were counted before


def flags(*unrolls):
    """Unrolls (reward, ends, live) side by side, as columns of one batch."""
    return tuple(torch.cat(parts, 1) for parts in zip(*unrolls))


def one_after_the_other(unrolls, lanes, gamma=0.9):
    """What feeding single unrolls gives: the scaler, behind the last one."""
    scaler = RewardScaler(4, gamma, True)
    for each, lane in zip(unrolls, lanes):
        scaler(*each, torch.tensor([lane]))
    return scaler


@pytest.mark.parametrize("lanes", [(2, 2), (1, 3, 1, 1, 3), (0, 1, 2, 3, 3, 2, 1, 0), (2,)])
def test_a_lane_several_times_in_a_batch_is_continued_in_the_order_of_its_unrolls(lanes):
    """Actors that run ahead have several unrolls in one batch."""
    unrolls = [unroll(7, 1, seed) for seed in range(len(lanes))]
    assert any(not ends[-1] for _, ends, _ in unrolls), "episodes go on from one unroll to the next"
    expected = one_after_the_other(unrolls, lanes)
    scaler = RewardScaler(4, 0.9, True)
    reward, ends, live = flags(*unrolls)
    ours = scaler(reward, ends, live, torch.tensor(lanes))
    torch.testing.assert_close(scaler.returns, expected.returns)
    assert scaler.running.count == expected.running.count == int(live.sum())
    torch.testing.assert_close(scaler.running.mean, expected.running.mean)
    torch.testing.assert_close(scaler.running.m2, expected.running.m2)
    deviation = (expected.running.m2 / expected.running.count + 1e-8).sqrt()
    torch.testing.assert_close(ours, (reward / deviation).float().clamp(-10, 10))


def test_the_order_of_the_unrolls_of_a_lane_matters():
    """Or the test above would compare two ways of ignoring it."""
    unrolls = [unroll(7, 1, seed) for seed in (0, 3)]
    returns = [one_after_the_other(order, (2, 2)).returns[2].item() for order in (unrolls, unrolls[::-1])]
    assert returns[0] != pytest.approx(returns[1])


@pytest.mark.parametrize(
    ("lanes", "replayed"),
    [
        ((1, 1), (False, True)),
        ((1, 1), (True, False)),
        ((1, 2, 1, 1), (False, True, True, False)),
        ((3,), (True,)),
    ],
)
def test_what_is_replayed_is_scaled_and_not_counted_again(lanes, replayed):
    """Neither in the moments nor in the running return of its lane, wherever it stands in the batch."""
    unrolls = [unroll(7, 1, seed) for seed in range(len(lanes))]
    before = unroll(9, 4, 20)
    scaler, expected = RewardScaler(4, 0.9, True), RewardScaler(4, 0.9, True)
    for each in (scaler, expected):
        each(*before, torch.arange(4))
    for each, lane, old in zip(unrolls, lanes, replayed):
        if not old:
            expected(*each, torch.tensor([lane]))
    reward, ends, live = flags(*unrolls)
    ours = scaler(reward, ends, live, torch.tensor(lanes), replayed=torch.tensor(replayed))
    for mine, theirs in zip(scaler.buffers(), expected.buffers()):
        torch.testing.assert_close(mine, theirs)
    deviation = (expected.running.m2 / expected.running.count + 1e-8).sqrt()
    torch.testing.assert_close(ours, (reward / deviation).float().clamp(-10, 10))


def test_ranks_whose_lanes_are_there_differently_often_make_one_collective():
    """One rank has two unrolls of one lane, the other none that is new: both wait for each other once."""
    group = ranks(2)
    torch.manual_seed(3)
    reward, ends, live = torch.rand(4, 2), torch.zeros(4, 2, dtype=torch.bool), torch.ones(4, 2, dtype=torch.bool)
    lanes = [torch.tensor([0, 0]), torch.tensor([1, 1])]
    replayed = [None, torch.tensor([True, True])]

    def work(rank):
        scaler = RewardScaler(2, 0.9, True)
        scaler(reward, ends, live, lanes[rank], group[rank], replayed[rank])
        return float(scaler.running.count), float(scaler.running.mean)

    first, second = agreed(together(group, work))
    assert first == second and first[0] == 8
