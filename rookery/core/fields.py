"""The keywords of `rookery.train`, `configure` and `resume`, for editors and type checkers: the fields of a run.

The dataclasses of `config.py` once more, as dicts in which nothing is required; a test compares both. They are for
reading only: at run time an unknown field is refused where the config is made, with the nearest name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Literal, TypedDict

from rookery.core.config import Topology, Torso, Tracker
from rookery.core.ranges import Count, NotNegative, Positive, Share, Whole


class NetFields(TypedDict, total=False):
    """Fields of `NetConfig`."""

    torso: Torso
    hidden: Sequence[Count]
    activation: Literal["tanh", "relu"]
    features: Whole
    standardize: bool
    shared: bool
    core: Literal["none", "gru", "lstm"]
    core_size: Count
    core_layers: Count
    feed_last: bool
    action_mask: Literal["auto", "info", "off"]
    normalize_obs: bool
    log_std: float
    state_std: bool
    squash: bool
    precision: Literal["fp32", "bf16"]
    module: str


class AtariFields(TypedDict, total=False):
    """Fields of `AtariConfig`."""

    frame_skip: Count
    stack: Count
    size: Count
    noop_max: Whole
    episodic_life: bool
    fire_reset: bool
    reward_clip: bool
    sticky: Share
    max_frames: Count
    full_actions: bool


class CheckpointFields(TypedDict, total=False):
    """Fields of `CheckpointConfig`."""

    every: Count
    keep: Count
    minutes: Positive


class EvalFields(TypedDict, total=False):
    """Fields of `EvalConfig`."""

    every: Whole
    episodes: Count
    envs: Count
    seed: int
    epsilon: Share
    stop: bool
    minutes: Positive


class GradientFields(TypedDict, total=False):
    """Fields of `GradientConfig`."""

    by_workers: bool
    max_age: Whole
    outlier: NotNegative


class GroupFields(TypedDict, total=False):
    """Fields of `GroupConfig`."""

    crew: Literal["inline", "processes", "ready"]
    workers: Whole
    timeout: Positive
    join: Positive
    preempt: Share
    preempt_after: Share


class RayFields(TypedDict, total=False):
    """Fields of `RayConfig`."""

    address: str
    cpus_per_actor: Positive
    cpus_per_shard: Positive
    least: Whole
    aggregators: Whole
    cpus_per_aggregator: Positive
    store_gib: NotNegative


class SupervisorFields(TypedDict, total=False):
    """Fields of `SupervisorConfig`."""

    step_deadline: Positive
    start_deadline: Positive
    restarts: Whole
    window: Positive
    grace: NotNegative
    spare: bool


class Fields(TypedDict, total=False):
    """Fields of `RunConfig` that a caller may name; nested groups are dicts of those to change."""

    algo: dict[str, Any]
    net: NetFields
    atari: AtariFields
    env_kwargs: dict[str, Any]
    env_steps: Count
    seed: int
    out: str | PurePath
    topology: Topology
    ranks: Count
    actors: Count
    envs_per_actor: Count
    device: Literal["cpu", "cuda"]
    threads: Whole
    compile: bool
    target_return: float | None
    metrics_from_info: Sequence[str]
    track: Sequence[Tracker]
    track_project: str
    quiet: bool
    log_every: NotNegative
    fault_plan: str
    debug: bool
    checkpoint: CheckpointFields
    eval: EvalFields
    gradients: GradientFields
    group: GroupFields
    ray: RayFields
    supervisor: SupervisorFields
