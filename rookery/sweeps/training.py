"""One run of a sweep, in the process of that run: started or resumed like any run, and told to stop by the sweep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rookery.algorithms.registry import parents_config
from rookery.core.printable import printable
from rookery.metrics.output import standard_streams
from rookery.processes.child import IDLE, heed
from rookery.processes.signals import Signals
from rookery.run.run import check, go_on
from rookery.run.run import start as begin


def train_one(channel: Any, start: dict[str, Any]) -> None:
    """Train, and tell the parent the exit code; `serve` tells it of an error."""
    config = check(parents_config(start["config"]))
    with Signals() as signals, standard_streams(run=True) as streams:
        heed(channel, signals)
        if start["resume"]:
            fields = {"threads": config.threads, "quiet": True} | ({"compile": True} if config.compile else {})
            run = go_on(Path(config.out), tuple(start["trust"]), fields, signals, _say)
        else:
            run = begin(config, signals, _say)
        streams.finish()
    channel.send({"op": "done", "exit_code": run.exit_code}, timeout=IDLE)


def _say(text: str) -> None:
    print(f"warning: {printable(text)}", file=sys.stderr)
