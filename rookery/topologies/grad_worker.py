"""The process of one worker of `async_grads.py`: it acts, remembers, draws and computes gradients, one per order.

An order is answered with a gradient on the weights of that moment if the memory allows a draw; if not, the worker takes
one more unroll first. The target networks follow the version of the weights, as the applier's own do.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rookery.actor import ActorReport
from rookery.topologies.supervise import serve

IDLE = 3600.0  # seconds without a word from the parent; its death closes the channel at once


@dataclass
class GradientReport(ActorReport):
    gradient: bool = False  # whether the slot holds one
    more: bool = False  # whether another one could be drawn without acting
    version: int = 0  # of the weights it was computed on
    loss: float = 0.0
    fresh: int = 0  # environment steps in its batch that were drawn for the first time
    waiting: int = 0  # steps in the memory that were never drawn
    evicted: int = 0  # steps that left it without ever being drawn
    learn_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


def body(channel: Any, start: dict[str, Any], fds: dict[str, int]) -> None:
    # Loaded here: from its first moment on, and not two seconds later, the process shall notice its parent's death.
    import msgspec
    import torch

    from rookery.envs.make import make
    from rookery.pipes.shm import Pulse, Segment, Slots, WeightBoard
    from rookery.registry import build_algorithm, decode_config
    from rookery.topologies.faults import FaultPlan
    from rookery.topologies.gradient import GradientMaker

    torch.set_num_threads(1)
    config = decode_config(start["config"], trust=tuple(start["trust"]))
    index, incarnation = start["index"], start["incarnation"]
    plan = FaultPlan.parse(config.fault_plan).only("actor", index, incarnation)
    plan.fire("actor", index, incarnation=incarnation, start=0)
    lanes = make(config, config.envs_per_actor)
    channel.send({"op": "ready", "spec": msgspec.to_builtins(lanes.spec)}, timeout=IDLE)

    memory = channel.recv(timeout=IDLE)
    slots = Slots(Segment.attach(fds["slots"], memory["slots_size"]), memory["layout"])
    board = WeightBoard(Segment.attach(fds["weights"], memory["weights_size"]))
    pulse = Pulse(Segment.attach(fds["pulse"], memory["pulse_size"]))
    maker = GradientMaker(config, build_algorithm(config, lanes.spec), lanes, index)
    sequence, actor = memory["sequence"], maker.producer.actor
    maker.producer.begin(sequence, f"{sequence}.{incarnation}")
    vector = torch.empty(maker.whole.size)
    channel.send({"op": "started"}, timeout=IDLE)

    while (order := channel.recv(timeout=IDLE))["op"] != "stop":
        slot, version = order["slot"], board.pull(vector.numpy())
        maker.load(vector, version)
        slots.begin(slot, index, incarnation, sequence, version)
        before = actor.sequence * actor.plan.unroll

        def tick(row: int, slot: int = slot, before: int = before) -> None:
            pulse.beat(index)
            slots.progress(slot, row)
            if plan:
                plan.fire("actor", index, before + row, actor.sequence, incarnation)

        report = maker.make(torch.from_numpy(slots.arrays(slot)["gradient"]), order["progress"], tick)
        sequence += 1
        slots.finish(slot)
        channel.send({"op": "full", "slot": slot, "report": dataclasses.asdict(report)}, timeout=IDLE)


if __name__ == "__main__":
    serve(body)
