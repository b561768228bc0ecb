"""Environments whose steps cost something, for topology auto. They import little: a process starts for each."""

from __future__ import annotations

import os
from time import perf_counter

import gymnasium
import support_masks


def compute(seconds: float = 3e-3) -> None:
    until = perf_counter() + seconds
    while perf_counter() < until:
        pass


class Slow(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action):
        compute()
        return self.env.step(action)


class Raising(Slow):
    def step(self, action):
        raise ValueError("not today")


class Crashing(Slow):
    def step(self, action):
        os._exit(9)


class MaskedSlow(support_masks.Maskable):
    """Its mask is in `info`, and an illegal action raises."""

    def step(self, action):
        compute()
        return super().step(action)


def quick():
    return gymnasium.make("CartPole-v1", max_episode_steps=20)
