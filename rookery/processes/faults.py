"""Faults on purpose: "actor[1]@env_step=137:sigkill;learner@update=7:nan".

The process itself checks at each count whether a fault is due, and triggers it at an exact logical time: no killer
process, no race, the same fault at the same place in every run. Meant for tests of Rookery, and of your own
environments and clusters. The supervisor handles what happens afterwards.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass

from rookery.core.errors import UsageError

ROLES = ("actor", "learner")
COUNTERS = ("start", "env_step", "unroll", "update")
SIGNALS = ("sigkill", "sigstop", "sigint", "sigterm", "sigusr1")
ACTIONS = (*SIGNALS, "hang", "raise", "exit", "nan")

_TRIGGER = re.compile(r"(\w+)(?:\[(\d+)\])?@(\w+)=(\d+):(\w+)(:always)?")
_EXAMPLE = "write for example actor[1]@env_step=137:sigkill;learner@update=7:nan"


class InjectedFault(RuntimeError):
    """The action "raise"."""


@dataclass(frozen=True)
class Trigger:
    """At `counter` >= `count`, once per process; in incarnation 0 only, or in each with `always`.

    `start` is 0 when a worker process begins, before it makes its environments.
    """

    role: str
    index: int | None  # None: any
    counter: str
    count: int
    action: str
    always: bool

    def __str__(self) -> str:
        index = "" if self.index is None else f"[{self.index}]"
        return f"{self.role}{index}@{self.counter}={self.count}:{self.action}{':always' if self.always else ''}"


class FaultPlan:
    def __init__(self, triggers: list[Trigger]):
        self._pending = triggers

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        return cls([_parse_trigger(part.strip()) for part in text.split(";") if part.strip()])

    def __bool__(self) -> bool:
        """Whether anything may still happen: ask before you count on the hot path."""
        return bool(self._pending)

    def only(self, role: str, index: int = 0, incarnation: int = 0) -> FaultPlan:
        """What concerns one worker: most often nothing."""
        return FaultPlan([trigger for trigger in self._pending if _concerns(trigger, role, index, incarnation)])

    def fire(
        self, role: str, index: int = 0, env_step: int | None = None, unroll: int | None = None, incarnation: int = 0,
        *, update: int | None = None, start: int | None = None,
    ) -> str | None:  # fmt: skip
        """Do what is due at these counts. Returns the action where only the caller can do it ("nan"), else None."""
        if not self._pending:
            return None
        counts = {"env_step": env_step, "unroll": unroll, "update": update, "start": start}
        for trigger in self._pending:
            count = counts[trigger.counter]
            if count is not None and count >= trigger.count and _concerns(trigger, role, index, incarnation):
                self._pending = [other for other in self._pending if other is not trigger]
                return _strike(trigger)
        return None


def _concerns(trigger: Trigger, role: str, index: int, incarnation: int) -> bool:
    if trigger.role != role or trigger.index not in (None, index):
        return False
    return trigger.always or incarnation == 0


def _strike(trigger: Trigger) -> str | None:
    if trigger.action in SIGNALS:
        os.kill(os.getpid(), signal.Signals[trigger.action.upper()])
    elif trigger.action == "hang":
        while True:
            time.sleep(3600.0)
    elif trigger.action == "raise":
        raise InjectedFault(f"fault plan: {trigger}")
    elif trigger.action == "exit":
        os._exit(1)
    else:
        return trigger.action
    return None


def _parse_trigger(text: str) -> Trigger:
    match = _TRIGGER.fullmatch(text)
    if match is None:
        raise UsageError(f"cannot read the fault {text!r}; {_EXAMPLE}")
    role, index, counter, count, action, always = match.groups()
    for word, known in ((role, ROLES), (counter, COUNTERS), (action, ACTIONS)):
        if word not in known:
            raise UsageError(f"unknown word {word!r} in the fault {text!r}, not one of {', '.join(known)}; {_EXAMPLE}")
    return Trigger(role, None if index is None else int(index), counter, int(count), action, always is not None)
