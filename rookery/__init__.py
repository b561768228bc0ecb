"""Rookery: distributed deep reinforcement learning on PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rookery.metrics.compare import compare
    from rookery.metrics.report import write_report as report
    from rookery.play.policy import Policy, load
    from rookery.run.run import Run, configure, resume, train
    from rookery.topologies.callbacks import Callback, Training

__version__ = "0.1.0"
__all__ = ["Callback", "Policy", "Run", "Training", "compare", "configure", "load", "report", "resume", "train"]

_WHERE = {
    **dict.fromkeys(("Run", "configure", "resume", "train"), "rookery.run.run"),
    **dict.fromkeys(("Callback", "Training"), "rookery.topologies.callbacks"),
    **dict.fromkeys(("Policy", "load"), "rookery.play.policy"),
    "compare": "rookery.metrics.compare",
    "report": "rookery.metrics.report",
}
_THERE = {"report": "write_report"}  # names that differ in their module


def __getattr__(name: str) -> Any:
    """Names are loaded when first used: worker processes import parts of the package without paying for all of it."""
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), _THERE.get(name, name))
    raise AttributeError(f"module 'rookery' has no attribute {name!r}")
