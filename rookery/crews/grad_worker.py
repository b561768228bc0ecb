"""The process of one worker of `async_grads.py`: it acts, remembers, draws and computes gradients, one per order.

An order is answered with a gradient on the weights of that moment if the memory allows a draw; if not, the worker takes
one more unroll first. The target networks follow the version of the weights, as the applier's own do.
"""

from __future__ import annotations

from typing import Any

from rookery.processes.child import serve


def body(channel: Any, start: dict[str, Any], fds: dict[str, int]) -> None:
    # Loaded here: from its first moment on, and not two seconds later, the process shall notice its parent's death.
    import torch

    from rookery.algorithms.registry import build_algorithm
    from rookery.crews.post import Post
    from rookery.roles.gradient import GradientMaker

    post = Post(channel, start, fds)
    maker = GradientMaker(post.config, build_algorithm(post.config, post.lanes.spec), post.lanes, post.index)
    maker.producer.recover = post.recover
    sequence = post.memory["sequence"]
    maker.producer.begin(sequence, post.life)
    vector = torch.empty(maker.whole.size)

    for order in post.orders():
        slot, version = order["slot"], post.board.pull(vector.numpy())
        maker.load(vector, version)
        tick = post.begin(slot, sequence, version, maker.producer.actor)
        report = maker.make(torch.from_numpy(post.slots.arrays(slot)["gradient"]), order["progress"], tick)
        sequence += 1
        post.finish(slot, report)


if __name__ == "__main__":
    serve(body)
