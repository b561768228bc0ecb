"""Rookery: distributed deep reinforcement learning on PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rookery.play.interface import compare, evaluate, export, plot, record, report
    from rookery.play.policy import Policy, load
    from rookery.play.prediction import Prediction
    from rookery.run.configured import configure
    from rookery.run.finished import Run
    from rookery.run.run import resume, train
    from rookery.sweeps.sweep import sweep
    from rookery.topologies.callbacks import Callback, Training

__version__ = "0.1.0"
__all__ = [
    "Callback", "Policy", "Prediction", "Run", "Training", "compare", "configure", "evaluate", "export", "load", "plot",
    "record", "report", "resume", "sweep", "train",
]  # fmt: skip

_WHERE = {
    "Run": "rookery.run.finished",
    "Prediction": "rookery.play.prediction",
    "configure": "rookery.run.configured",
    **dict.fromkeys(("resume", "train"), "rookery.run.run"),
    **dict.fromkeys(("Callback", "Training"), "rookery.topologies.callbacks"),
    **dict.fromkeys(("Policy", "load"), "rookery.play.policy"),
    **dict.fromkeys(("compare", "evaluate", "export", "plot", "record", "report"), "rookery.play.interface"),
    "sweep": "rookery.sweeps.sweep",
}


def __getattr__(name: str) -> Any:
    """Names are loaded when first used: worker processes import parts of the package without paying for all of it."""
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'rookery' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
