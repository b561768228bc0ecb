"""One torch thread for the tests: arrays are small here, and waiting threads are slow on a busy machine.

Signals are heard even where the tests run as a background job or under nohup: such jobs ignore some, and so does what
they start.

The files that take longest come first, so that the last to end is a short one (`make test`: `--no-loadscope-reorder`).
"""

from __future__ import annotations

import signal

import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

LONGEST = (
    "topologies/test_replay_topologies", "topologies/test_ray_shards", "topologies/test_ranks", "crews/test_ray.py",
    "topologies/test_faults_local", "topologies/test_ray_cluster", "learning/", "topologies/test_ray_faults",
    "crews/test_process_crew", "topologies/test_ray_ranks", "crews/test_orders", "topologies/test_ray_aggregators",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: min((places[name] for name in LONGEST if name in item.nodeid), default=len(LONGEST)))
