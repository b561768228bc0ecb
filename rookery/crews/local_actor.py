"""The process of one actor: `python -m rookery.crews.local_actor`, started by `local.py` and by nobody else.

It fills the slots it is given with what its environments and the newest weights make.
"""

from __future__ import annotations

from typing import Any

from rookery.processes.child import serve


def body(channel: Any, start: dict[str, Any], fds: dict[str, int]) -> None:
    # Loaded here: from its first moment on, and not two seconds later, the process shall notice its parent's death.
    import torch

    from rookery.algorithms.registry import build_algorithm
    from rookery.core.types import Replay
    from rookery.crews.post import Post
    from rookery.pipes.channel import pack_tree, unpack_tree
    from rookery.roles.producer import Producer
    from rookery.roles.weights import Published

    post = Post(channel, start, fds)
    algorithm = build_algorithm(post.config, post.lanes.spec)
    nets = algorithm.nets()
    published = Published(algorithm, nets)
    vector = torch.empty(published.size)
    said: list[str] = []  # for the user's eyes: told with the next snapshot
    producer = Producer(algorithm, nets, post.lanes, post.config.seed, post.index, said.append)
    producer.recover = post.recover
    actor, table = producer.actor, producer.plan.table
    refresh = table.refresh if isinstance(table, Replay) and not table.in_turns else 0
    rows = producer.plan.unroll * post.lanes.count  # resets included: an episode's end puts nothing off
    snapshot = None if post.memory["snapshot"] is None else unpack_tree(post.memory["snapshot"])
    producer.begin(post.memory["sequence"], post.life, snapshot)
    version, steps = -1, 0  # of the weights we act with, and steps taken with them

    for order in post.orders():
        if order["op"] == "snapshot":
            state = producer.snapshot(travels=pack_tree)
            try:
                post.send({"op": "snapshot", "state": None if state is None else pack_tree(state), "said": said})
            except ValueError as error:  # too large to send, and nothing was
                producer.complain(error)
                post.send({"op": "snapshot", "state": None, "said": said})
            said.clear()
            continue
        slot = order["slot"]
        if version < 0 or steps >= refresh:
            version, steps = post.board.pull(vector.numpy()), 0
            published.load(vector)
        tick = post.begin(slot, actor.sequence, version, actor)
        report = producer.fill(post.slots.arrays(slot), version, tick)
        steps += rows
        post.finish(slot, report)


if __name__ == "__main__":
    serve(body)
