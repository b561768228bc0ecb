"""The learner: a gradient is a value, nothing non-finite passes, a loss moves its own group, a resumed one goes on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from support_lanes import BOX, DISCRETE, SMALL, ScriptedLanes, build
from torch import nn

from rookery.algorithms.base import Algorithm
from rookery.algorithms.ppo import PPO
from rookery.core.config import NetConfig, ReplayConfig
from rookery.core.errors import NumericError
from rookery.core.types import ActOutput, DataPlan, LossOutput, Queue, Replay
from rookery.roles.learner import Learner

NETS = {
    "split": NetConfig(hidden=(8,)),
    "shared": NetConfig(hidden=(8,), shared=True),
    "gru": NetConfig(hidden=(8,), core="gru", core_size=5),
    "lstm2": NetConfig(hidden=(8,), core="lstm", core_size=5, core_layers=2),
}


class Toy(Algorithm):
    """Two groups in the manner of DPG: the actor's loss goes through the critic, the critic's through the actor."""

    Config = dict
    published = ("actor",)
    groups = {"actor": ("actor",), "critic": ("critic",)}  # noqa: RUF012 - constant

    def __init__(self, max_grad_norm: float = math.inf, which: tuple[str, ...] = ("actor", "critic")):
        super().__init__({}, NetConfig(), ScriptedLanes().spec, 4)
        self.max_grad_norm, self.which = max_grad_norm, which

    def nets(self) -> nn.ModuleDict:
        return nn.ModuleDict({"actor": nn.Linear(3, 2), "critic": nn.Linear(5, 1)})

    def plan(self) -> DataPlan:
        return DataPlan(4, 4, Queue())

    def initial_state(self, nets, lanes):
        return {}

    def act(self, nets, obs, state, explore) -> ActOutput:
        action = nets["actor"](obs["obs"])
        return ActOutput(action, action.sum(-1), {})

    def losses(self, nets, batch) -> LossOutput:
        action = nets["actor"](batch)
        q = nets["critic"](torch.cat([batch, action], -1)).squeeze(-1)
        losses = {"actor": -q.mean(), "critic": (q - 1).square().mean()}
        return LossOutput({name: losses[name] for name in self.which}, {"q": q.mean().detach()})

    def optimizers(self, parameters):
        return {name: torch.optim.SGD([p], 1.0) for name, p in parameters.items()}


def toy(**kwargs) -> tuple[Learner, torch.Tensor]:
    return Learner(Toy(**kwargs), seed=1), torch.randn(6, 3, generator=torch.Generator().manual_seed(2))


def values(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.nets.named_parameters()}


def moments_of(learner: Learner) -> list[torch.Tensor]:
    """Everything the optimisers remember."""
    found = []
    for group, optimizer in learner.optimizers.items():
        found += [torch.as_tensor(x).clone() for x in optimizer.state[learner.flat[group].parameter].values()]
    return found


# Groups


def test_each_loss_fills_the_gradient_of_its_own_group_only():
    learner, batch = toy()
    nets = learner.nets
    output = learner.algorithm.losses(nets, batch)
    expected = {
        group: torch.autograd.grad(output.losses[group], list(nets[group].parameters()), retain_graph=True)
        for group in ("actor", "critic")
    }
    for _ in range(2):  # twice: gradients are filled, not added up
        learner.gradients(batch)
        for group, parts in expected.items():
            for parameter, gradient in zip(nets[group].parameters(), parts, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)


def test_a_loss_that_is_absent_leaves_its_group_alone():
    """An update of the critic alone (delayed policy updates): neither its gradient nor a step for the actor."""
    learner, batch = toy()
    learner.algorithm.which = ("critic",)
    before = values(learner)
    learner.gradients(batch)
    learner.apply()
    after = values(learner)
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("actor"))
    assert all(not torch.equal(before[name], after[name]) for name in before if name.startswith("critic"))


def test_a_gradient_that_is_not_finite_in_one_group_stops_both():
    learner, batch = toy()
    learner.gradients(batch)
    learner.flat["critic"].grad[0] = math.nan
    before = values(learner)
    assert learner.apply() == {} and learner.skipped == 1 and learner.updates == 0
    assert all(torch.equal(before[name], value) for name, value in values(learner).items())


# Between gradient and step


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_the_norm_of_the_gradient_is_clipped_exactly(scale):
    learner, batch = toy(max_grad_norm=0.5)
    learner.gradients(batch)
    for flat in learner.flat.values():
        flat.grad.mul_(scale / flat.grad.norm())
    gradients = {group: flat.grad.clone() for group, flat in learner.flat.items()}
    before = {group: flat.data.clone() for group, flat in learner.flat.items()}
    norms = learner.apply()
    for group, flat in learner.flat.items():
        step = before[group] - flat.data
        expected = gradients[group] * min(1.0, 0.5 / scale)
        torch.testing.assert_close(step, expected, rtol=1e-5, atol=1e-6)
        assert float(norms[f"grad_norm_{group}"]) == pytest.approx(scale, rel=1e-5), "as it was before the clip"


def test_gradients_alone_move_nothing_and_apply_needs_no_batch():
    rig = build()
    learner = rig.learner
    before = learner.flat["all"].data.clone()
    learner.gradients(rig.prepared(rig.collect()))
    assert torch.equal(learner.flat["all"].data, before) and learner.updates == 0
    learner.apply()
    assert not torch.equal(learner.flat["all"].data, before) and learner.updates == 1


def test_a_gradient_computed_elsewhere_gives_the_same_step():
    """What a worker sends, an applier applies."""
    worker, applier = build(), build()
    worker.learner.gradients(worker.prepared(worker.collect()))
    applier.learner.flat["all"].grad.copy_(worker.learner.flat["all"].grad)
    worker.learner.apply()
    applier.learner.apply()
    assert torch.equal(worker.learner.flat["all"].data, applier.learner.flat["all"].data)


# What is not finite


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(poison):
    rig = build()
    learner = rig.learner
    prepared = rig.prepared(rig.collect())
    learner.gradients(prepared)
    learner.apply()
    weights, memory = learner.flat["all"].data.clone(), moments_of(learner)
    assert memory
    for skips in (1, 2):
        learner.gradients(prepared)
        learner.flat["all"].grad[3] = poison
        assert learner.apply() == {}
        assert (learner.skipped, learner.updates) == (skips, 1)
    assert torch.equal(learner.flat["all"].data, weights)
    assert all(torch.equal(a, b) for a, b in zip(memory, moments_of(learner), strict=True))
    learner.gradients(prepared)  # a good one in between: the count starts again
    assert learner.apply()
    for _ in range(2):
        learner.flat["all"].grad.fill_(poison)
        learner.apply()
    weights = learner.flat["all"].data.clone()
    learner.flat["all"].grad.fill_(poison)
    with pytest.raises(NumericError, match="3 times in a row"):
        learner.apply()
    assert learner.skipped == 5 and torch.equal(learner.flat["all"].data, weights)


def test_metrics_are_the_means_of_the_minibatches_that_were_applied():
    """One row with a bad log-probability spoils one of two minibatches, the first or the second."""
    outcomes = set()
    for seed in range(6):
        config = dataclasses.replace(SMALL, epochs=1, minibatches=2, normalize_advantage=False, entropy=0.0)
        rig = build(config=config, seed=seed)
        batch = rig.collect()
        row, lane = np.argwhere(batch.live.numpy())[5]
        batch.logp[row, lane] = math.nan
        bad = []
        losses = rig.algorithm.losses

        def watched(nets, minibatch, losses=losses, bad=bad):
            bad.append(bool(minibatch.logp.isnan().any()))
            return losses(nets, minibatch)

        rig.learner._losses = watched
        report = rig.learner.step(batch, 0.0)
        outcomes.add(tuple(bad))
        assert (rig.learner.updates, rig.learner.skipped, rig.learner.version) == (1, 1, 1)
        assert all(math.isfinite(x) for x in report.metrics.values()), (bad, report.metrics)
        assert report.metrics["grad_norm"] > 0 and report.metrics["minibatches"] == 1
    assert outcomes == {(True, False), (False, True)}


def test_an_update_without_a_good_minibatch_tells_nothing_that_is_not_finite():
    rig = build(config=dataclasses.replace(SMALL, epochs=1, minibatches=1))
    batch = rig.collect()
    batch.logp.fill_(math.nan)
    report = rig.learner.step(batch, 0.0)
    assert all(math.isfinite(x) for x in report.metrics.values()) and report.metrics["minibatches"] == 0
    assert rig.learner.skipped == 1


def test_three_bad_minibatches_in_a_row_end_the_run():
    rig = build(config=dataclasses.replace(SMALL, epochs=2, minibatches=2))
    batch = rig.collect()
    batch.logp.fill_(math.nan)
    before = rig.learner.flat["all"].data.clone()
    with pytest.raises(NumericError, match="weights are untouched"):
        rig.learner.step(batch, 0.0)
    assert torch.equal(rig.learner.flat["all"].data, before)


# A whole update


@pytest.mark.parametrize("action", [DISCRETE, BOX], ids=lambda spec: spec.kind)
@pytest.mark.parametrize("name", NETS)
def test_every_parameter_changes_in_one_update(name, action):
    """P97."""
    net = dataclasses.replace(NETS[name], normalize_obs=True)
    rig = build(lambda: ScriptedLanes(action=action), net=net)
    before = values(rig.learner)
    rig.update()
    after = values(rig.learner)
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert not same and rig.learner.updates == SMALL.epochs * SMALL.minibatches
    assert all(p.requires_grad for p in rig.learner.nets.parameters())


def test_parameters_stay_views_of_the_flat_vector():
    rig = build(net=NETS["lstm2"])
    rig.update()
    flat = rig.learner.flat["all"]
    low, high = flat.data.data_ptr(), flat.data.data_ptr() + 4 * flat.data.numel()
    for parameter in rig.learner.nets.parameters():
        assert low <= parameter.data_ptr() < high
        assert flat.grad.data_ptr() <= parameter.grad.data_ptr() < flat.grad.data_ptr() + 4 * flat.grad.numel()


def test_metrics_say_how_the_update_went():
    rig = build()
    report = rig.update()
    assert {"policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "explained_variance", "grad_norm", "lr",
            "minibatches"} <= report.metrics.keys()  # fmt: skip
    assert all(type(x) in (int, float) for x in report.metrics.values())
    assert report.metrics["minibatches"] == SMALL.epochs * SMALL.minibatches


def test_the_same_seed_starts_with_the_same_weights_and_another_does_not():
    a, b, c = (Learner(PPO(SMALL, NETS["split"], ScriptedLanes().spec, 4), seed) for seed in (1, 1, 2))
    assert torch.equal(a.flat["all"].data, b.flat["all"].data)
    assert not torch.equal(a.flat["all"].data, c.flat["all"].data)


# State


@pytest.mark.parametrize("name", NETS)
def test_a_loaded_learner_goes_on_bit_for_bit(name):
    """P103: 4 updates are 2, state and load, and 2 more; normaliser, reward scaler, Adam and shuffles included."""
    net = dataclasses.replace(NETS[name], normalize_obs=True)
    config = dataclasses.replace(SMALL, scale_reward=True, clip_end=0.05, lr=1e-3)
    rig = build(config=config, net=net)
    batches = []
    for i in range(4):
        batches.append(rig.collect())
        rig.learner.step(batches[-1], i / 4)
        if i == 1:
            tensors, numbers = rig.learner.state()
            tensors = {key: value.clone() for key, value in tensors.items()}
    resumed = Learner(PPO(config, net, ScriptedLanes().spec, 4), seed=7)
    resumed.load(tensors, numbers)
    assert torch.equal(resumed.published.read(), published_at(resumed, tensors))
    for i in (2, 3):
        resumed.step(batches[i], i / 4)
    (expected, expected_numbers), (got, got_numbers) = rig.learner.state(), resumed.state()
    assert expected.keys() == got.keys() and expected_numbers == got_numbers
    for key in expected:
        assert torch.equal(expected[key], got[key]), key
    assert torch.equal(rig.learner.published.read(), resumed.published.read())
    assert any(key.startswith("optimizer/") for key in expected) and "nets/reward_scaler.returns" in expected


def published_at(learner: Learner, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The vector as the stored tensors have it, through a learner of its own."""
    other = Learner(learner.algorithm, seed=99)
    other.nets.load_state_dict({k.removeprefix("nets/"): v for k, v in tensors.items() if k.startswith("nets/")})
    return other.published.read()


def test_state_before_the_first_update_can_be_loaded():
    a, b = build(seed=1), build(seed=2)
    b.learner.load(*a.learner.state())
    batch = a.collect()
    a.learner._seed = b.learner._seed = 1
    for rig in (a, b):
        rig.learner.step(batch, 0.0)
    assert torch.equal(a.learner.flat["all"].data, b.learner.flat["all"].data)


def test_loading_does_not_tie_two_learners_together():
    a, b = build(), build()
    a.update()
    tensors, numbers = a.learner.state()
    b.learner.load(tensors, numbers)
    kept = {key: value.clone() for key, value in b.learner.state()[0].items()}
    a.update()
    assert all(torch.equal(kept[key], value) for key, value in b.learner.state()[0].items())


def test_the_count_of_skips_survives():
    rig = build()
    rig.learner.gradients(rig.prepared(rig.collect()))
    rig.learner.flat["all"].grad.fill_(math.nan)
    rig.learner.apply()
    other = build()
    other.learner.load(*rig.learner.state())
    assert (other.learner.skipped, other.learner.updates, other.learner.version) == (1, 0, 0)


def test_a_learner_is_finite_before_its_first_update_and_not_with_a_bad_weight():
    """The bounds of a normaliser that has seen nothing are infinite; a checkpoint of it is a good one."""
    learner = build(net=NetConfig(hidden=(8,), normalize_obs=True)).learner
    assert any(not torch.isfinite(t).all() for t in learner.state()[0].values()) and learner.finite()
    next(iter(learner.flat.values())).data[0] = math.nan
    assert not learner.finite()


def test_the_weights_of_a_version_are_checked_once(monkeypatch):
    rig, checks = build(), []
    finite = Learner.finite
    monkeypatch.setattr(Learner, "finite", lambda learner: checks.append(learner.version) or finite(learner))
    rig.learner.ensure_finite()
    rig.learner.ensure_finite()
    assert checks == [0]
    rig.update()  # PPO checks after every update
    rig.learner.ensure_finite()
    assert checks == [0, 1]
    rig.learner.check_every = 50  # as with a replay memory
    rig.update()
    assert checks == [0, 1]
    rig.learner.ensure_finite()
    assert checks == [0, 1, 2]
    rig.learner.load(*rig.learner.state())
    rig.learner.flat["all"].data[0] = math.nan
    for _ in range(2):  # what failed was not checked
        with pytest.raises(NumericError):
            rig.learner.ensure_finite()


@pytest.mark.parametrize(("plan", "every"), [(Queue(), 1), (Replay(ReplayConfig(), 0.99), 50)])
def test_how_often_weights_are_checked_is_said_by_the_plan(plan, every, monkeypatch):
    monkeypatch.setattr(Toy, "plan", lambda self: DataPlan(4, 4, plan))
    learner, batch = toy()
    for optimizer in learner.optimizers.values():
        optimizer.param_groups[0]["lr"] = 0.0
    checks = []
    monkeypatch.setattr(learner, "check_finite", lambda: checks.append(learner.version))
    for _ in range(100):
        learner.step(batch, 0.0)
    assert checks == list(range(every, 101, every))
