"""A run as `train` and `resume` return it: where it is and what came out. It can be given where a path is expected."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rookery.core.config import RunConfig
from rookery.storage.trust import modules, needed


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run.

    >>> run = rookery.train("ppo", env="CartPole-v1", env_steps=2_000, quiet=True)
    >>> run.summary["exit_reason"]
    'env_steps'
    >>> sorted(each.name for each in run.path.iterdir())[:3]
    ['checkpoints', 'config.json', 'lock']
    """

    path: Path
    config: RunConfig
    summary: dict[str, Any]
    exit_code: int = 0
    rank: int = 0  # of the process that returns it; the first one has written the folder

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that its config names besides what Rookery knows: this process has trained it with them."""
        return needed(self.config)

    def __repr__(self) -> str:
        return f"<Run {str(self.path)!r}: {', '.join(self._facts().values())}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        facts = {"folder": str(self.path)} | self._facts()
        rows = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in facts.items())
        return f"<table>{''.join(rows)}</table>"

    def _facts(self) -> dict[str, str]:
        told = self.summary
        facts = {"recipe": f"{self.config.recipe} on {self.config.env}"}
        if "env_steps" in told:
            facts["steps"] = f"{told['env_steps']:,} steps in {told.get('wall_s', 0.0):,.1f} s"
        if isinstance(mean := told.get("return_mean"), int | float):
            last = min(100, told.get("episodes", 100))
            facts["return"] = f"return {mean:.1f} ± {told.get('return_std', 0.0):.1f} (last {last} episodes)"
        elif told.get("episodes") == 0:
            facts["return"] = "no episode has ended"
        if restarts := told.get("restarts"):
            facts["restarts"] = f"{restarts:,} restarts of workers or environments (see metrics.jsonl)"
        if reason := told.get("stop_reason") or told.get("exit_reason"):
            facts["end"] = f"ended by {reason}"
        return facts


def trusted(run: Any, trust: tuple[str, ...]) -> tuple[str, ...]:
    """The modules that the caller trusts a stored run with; UsageError if `trust` names no module."""
    return modules(trust) + (run.modules if isinstance(run, Run) else ())
