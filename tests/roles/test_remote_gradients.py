"""Gradients that workers compute and a learner accepts: schedules reach the worker, an applier needs no batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support_lanes import SMALL, build

from rookery.core.config import NetConfig


def test_schedules_reach_the_gradients_of_a_worker():
    """The entropy bonus of a worker falls as the learner's does."""
    config = dataclasses.replace(SMALL, epochs=1, minibatches=1, entropy=0.5, entropy_end=0.0, clip_end=0.01)
    rig = build(config=config)
    batch = rig.collect()
    losses = [float(rig.learner.first_gradients(batch, progress).losses["all"].detach()) for progress in (0.0, 1.0)]
    assert losses[0] != losses[1]
    assert float(rig.algorithm.entropy) == 0.0 and float(rig.algorithm.clip) == pytest.approx(0.01)


def test_an_applier_needs_no_batch():
    """An algorithm with statistics of observations, too: they are taken where batches are."""
    rig = build(net=NetConfig(hidden=(8,), normalize_obs=True))
    rig.learner.accept(torch.ones_like(rig.learner.flat["all"].grad), 0.0)
    assert rig.learner.updates == rig.learner.version == 1


def test_a_gradient_of_a_worker_can_be_spoiled_on_purpose():
    learner = build().learner
    learner.spoil = lambda updates: True
    gradient = torch.ones_like(learner.flat["all"].grad)
    assert learner.accept(gradient, 0.0) == {} and learner.skipped == 1
