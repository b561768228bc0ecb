"""Environments that misbehave in the process that evaluates, and only there."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import gymnasium


class Misbehaves(gymnasium.Wrapper):
    def __init__(self, env: gymnasium.Env, what: str, mark: str):
        super().__init__(env)
        self.what, self.mark = what, Path(mark)

    def step(self, action):
        if self.what == "raise":
            raise ArithmeticError("in evaluation only")
        if self.what == "die_once" and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "hang":
            self.mark.write_text(str(os.getpid()))
            threading.Event().wait()
        return self.env.step(action)


def evaluates() -> bool:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == "rookery.run.evaluator_main"


def make(what: str = "", mark: str = "") -> gymnasium.Env:
    env = gymnasium.make("CartPole-v1", max_episode_steps=5)
    return Misbehaves(env, what, mark) if what and evaluates() else env
