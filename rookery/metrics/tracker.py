"""Experiment trackers: Weights & Biases, MLflow and trackio, a small class each, behind one protocol.

A tracker may block, fail, handle signals and leave threads behind: it lives in a process of its own
(`run/tracker_main.py`), which the sink in `run/tracking.py` talks to. So this file is loaded there, and imports neither
torch nor, before it is asked for one, a tracker. Where they send records and as whom, their own environment variables
say. Environment steps are the axis: a run that was resumed takes some of them again, and trackers accept that.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from rookery.core.errors import INTERRUPT, REQUEUE, UsageError

PROJECT = "rookery"
ID = re.compile(r"[\w.+ -]{1,200}")  # what is read from a run folder
MODULES = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
CLASSES = {
    "wandb": "rookery.metrics.tracker:Wandb",
    "mlflow": "rookery.metrics.tracker:MLflow",
    "trackio": "rookery.metrics.tracker:Trackio",
}
STATUS = {0: "FINISHED", REQUEUE: "KILLED", INTERRUPT: "KILLED"}  # of MLflow; any other exit code: FAILED
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


class Tracker(Protocol):
    """Made with `project` ("": not said), `name` of the run, `id` ("": a new run) and `config`, flat.

    `id` continues the run later, `about` is for the user: where the run can be seen.
    """

    id: str
    about: str

    def log(self, env_steps: int, wall_time: float, numbers: Mapping[str, float]) -> None: ...

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None: ...


def check_trackers(names: tuple[str, ...]) -> None:
    """UsageError for one that is not installed, which names the extra."""
    for name in names:
        if importlib.util.find_spec(MODULES[name]) is None:
            # trackio is no extra: no version of it goes together with the Pillow that we test with.
            what = name if name == "trackio" else f"'rookery[{name}]'"
            raise UsageError(f"{name} is not installed: pip install {what}, or leave it out of `track`")


def redacted(text: str) -> str:
    """Without passwords in addresses and without the values of environment variables that are secrets."""
    text = re.sub(r"://[^/@\s]+@", "://***@", text)
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return text


class Wandb:
    """WANDB_API_KEY, WANDB_MODE, WANDB_DIR, WANDB_ENTITY and the others of its own mean what they always mean."""

    def __init__(self, project: str, name: str, id: str, config: Mapping[str, Any]):
        import wandb

        self._wandb, self.id = wandb, id or secrets.token_hex(4)
        self._run = wandb.init(
            project=project or os.environ.get("WANDB_PROJECT") or PROJECT, name=name, id=self.id, resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self._run.config.update(dict(config), allow_val_change=True)  # of a resumed run, some fields may have changed
        self._run.define_metric("env_steps", hidden=True)
        self._run.define_metric("*", step_metric="env_steps")
        self.about = self._run.url or f"recorded in {os.path.dirname(self._run.dir)}"

    def log(self, env_steps: int, wall_time: float, numbers: Mapping[str, float]) -> None:
        self._run.log({"env_steps": env_steps, **numbers})

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=exit_code)
        self._wandb.teardown()


class MLflow:
    """MLFLOW_TRACKING_URI says where; MLFLOW_EXPERIMENT_NAME the experiment, if no project was given.

    Its client alone, without `mlflow.start_run`: nothing is global, and nothing is sent when the process ends.
    """

    def __init__(self, project: str, name: str, id: str, config: Mapping[str, Any]):
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        known: dict[str, str] = {}
        self.id = ""
        if id:
            try:
                known = self._client.get_run(id).data.params
                self._client.update_run(id, status="RUNNING")
                self.id = id
            except MlflowException:  # deleted there, or another server: a new run
                known = {}
        if not self.id:
            project = project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            found = self._client.get_experiment_by_name(project)
            where = found.experiment_id if found else self._client.create_experiment(project)
            self.id = self._client.create_run(where, run_name=name).info.run_id
        given = {key: str(value)[:500] for key, value in config.items()}
        new = [Param(key, value) for key, value in given.items() if key not in known]
        for start in range(0, len(new), 100):
            self._client.log_batch(self.id, params=new[start : start + 100])
        for key in (key for key in given if known.get(key, given[key]) != given[key]):
            self._client.set_tag(self.id, f"resumed.{key}", given[key])  # a parameter cannot change there
        self.about = f"run {self.id}"

    def log(self, env_steps: int, wall_time: float, numbers: Mapping[str, float]) -> None:
        at = int(1000 * wall_time)
        # Names may hold no other characters.
        values = [self._metric(re.sub(r"[^\w\-./ ]", "_", key), x, at, env_steps) for key, x in numbers.items()]
        for start in range(0, len(values), 1000):
            self._client.log_batch(self.id, metrics=values[start : start + 1000])

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        for key, value in summary.items():
            self._client.set_tag(self.id, key, str(value)[:500])
        self._client.set_terminated(self.id, STATUS.get(exit_code, "FAILED"))


class Trackio:
    """Local unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says otherwise. A run is found again by its name."""

    def __init__(self, project: str, name: str, id: str, config: Mapping[str, Any]):
        import trackio

        project = project or os.environ.get("TRACKIO_PROJECT") or PROJECT
        run = trackio.init(
            project=project, name=id or name, resume="allow" if id else "never", config=dict(config), embed=False
        )
        self._trackio, self.id, self.about = trackio, run.name, f"project {project}, run {run.name}"

    def log(self, env_steps: int, wall_time: float, numbers: Mapping[str, float]) -> None:
        self._trackio.log(dict(numbers), step=env_steps)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        if summary:
            self._trackio.log({f"summary/{key}": value for key, value in summary.items()})
        self._trackio.finish()
