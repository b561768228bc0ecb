"""Callbacks that another process can import."""

from __future__ import annotations

import os

import rookery


class Stops(rookery.Callback):
    """Changes the step size, then stops the run; writes down what it is told."""

    def _say(self, word: str) -> None:
        with open(os.environ["SUPPORT_CALLBACKS"], "a") as file:
            file.write(word + "\n")

    def on_start(self, run: rookery.Training) -> None:
        self._say("start")

    def on_update(self, run: rookery.Training) -> None:
        self._say("update")
        if run.version == 1:
            run.change("algo.lr", 1e-3)
        if run.version == 3:
            run.stop("rank 0 says so")

    def on_end(self, run: rookery.Training) -> None:
        self._say("end")


def fails(run: rookery.Training) -> None:
    if run.version == 2:
        raise ZeroDivisionError("of mine")
