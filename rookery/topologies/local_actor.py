"""The process of one actor: `python -m rookery.topologies.local_actor`, started by `local.py` and by nobody else.

It says what its environment looks like, is told where the shared memory lies, then fills the slots it is given.
"""

from __future__ import annotations

from typing import Any

from rookery.topologies.supervise import serve

IDLE = 3600.0  # seconds without a word from the parent; its death closes the channel at once


def body(channel: Any, start: dict[str, Any], fds: dict[str, int]) -> None:
    # Loaded here: from its first moment on, and not two seconds later, the process shall notice its parent's death.
    import msgspec
    import torch

    from rookery.envs.make import make
    from rookery.pipes.channel import pack_tree, unpack_tree
    from rookery.pipes.shm import Pulse, Segment, Slots, WeightBoard
    from rookery.producer import Producer
    from rookery.registry import build_algorithm, decode_config
    from rookery.topologies.faults import FaultPlan
    from rookery.weights import Published

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
    algorithm = build_algorithm(config, lanes.spec)
    nets = algorithm.nets()
    published = Published(algorithm, nets)
    vector = torch.empty(published.size)
    producer = Producer(algorithm, nets, lanes, config.seed, index)
    actor, refresh = producer.actor, getattr(producer.plan.table, "refresh", 0)
    snapshot = None if memory["snapshot"] is None else unpack_tree(memory["snapshot"])
    producer.begin(memory["sequence"], f"{memory['sequence']}.{incarnation}", snapshot)
    version, steps = -1, 0  # of the weights we act with, and steps taken with them
    channel.send({"op": "started"}, timeout=IDLE)

    while (order := channel.recv(timeout=IDLE))["op"] != "stop":
        if order["op"] == "snapshot":
            state = producer.snapshot()
            channel.send({"op": "snapshot", "state": None if state is None else pack_tree(state)}, timeout=IDLE)
            continue
        slot = order["slot"]
        if version < 0 or steps >= refresh:
            version, steps = board.pull(vector.numpy()), 0
            published.load(vector)
        slots.begin(slot, index, incarnation, actor.sequence, version)
        before = actor.sequence * actor.plan.unroll

        def tick(row: int, slot: int = slot, before: int = before) -> None:
            pulse.beat(index)
            slots.progress(slot, row)
            if plan:
                plan.fire("actor", index, before + row, actor.sequence, incarnation)

        report = producer.fill(slots.arrays(slot), version, tick)
        steps += report.steps
        slots.finish(slot)
        channel.send({"op": "full", "slot": slot, "report": msgspec.to_builtins(report)}, timeout=IDLE)


if __name__ == "__main__":
    serve(body)
