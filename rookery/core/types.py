"""The data contract: what an environment looks like, what an unroll carries, what a plan asks for.

Frozen dataclasses of arrays and nothing else. Arrays are numpy on the actor's side of a pipe and torch on the
learner's; the field names and shapes are the same on both. Shapes are time-major: T steps, B environments ("lanes").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from rookery.core.config import ReplayConfig

if TYPE_CHECKING:  # environments are probed in processes that should not pay for loading torch
    import torch

Tree = Any  # an array, or a dict of trees
Arrays = dict[str, np.ndarray]  # by path, "obs/image"
Shapes = dict[str, tuple[tuple[int, ...], str]]  # of arrays, by path: shape and dtype
MASK = "action_mask"  # the observation that says which actions are legal: bool, the choices of all branches in a row


@dataclass(frozen=True)
class Leaf:
    """One array of an observation, per environment."""

    shape: tuple[int, ...]
    dtype: str  # numpy name; frames stay uint8
    kind: Literal["vector", "image", "discrete", "multi", "mask"]  # multi: several integers; mask: see MASK
    n: int = 0  # number of values, for kind "discrete"
    stack: int = 1  # images: frames along the first axis, newest last, each row one newer; 1: not a stack
    counts: tuple[int, ...] = ()  # number of values of each integer of kind "multi", flattened
    starts: tuple[int, ...] = ()  # first value of each integer, as the environment counts; empty: 0

    @property
    def width(self) -> int:
        """Numbers that show one of them to a network: integers are one-hot."""
        return (
            sum(self.counts)
            if self.kind == "multi"
            else math.prod(self.shape) * (self.n if self.kind == "discrete" else 1)
        )

    def admits(self, values: np.ndarray) -> bool:
        """Whether integers [..., *shape], counted from 0, are values that they can have."""
        most = np.reshape(self.counts, self.shape) if self.kind == "multi" else self.n
        return bool((values >= 0).all() and (values < most).all())


@dataclass(frozen=True)
class ActionSpec:
    """What an action is. Box actions live in [-1, 1] inside Rookery where the bounds are finite; envs/ maps them."""

    kind: Literal["discrete", "multi", "box"]
    choices: tuple[int, ...] = ()  # discrete: one entry; multi: one per branch
    starts: tuple[int, ...] = ()  # first value of each choice, as the environment counts
    size: int = 0  # box: number of dimensions, flattened
    low: tuple[float | None, ...] = ()  # box: bounds per dimension; None: unbounded
    high: tuple[float | None, ...] = ()
    box_shape: tuple[int, ...] = ()  # box: shape of the environment's own actions

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one action, per environment."""
        return {"discrete": (), "multi": (len(self.choices),), "box": (self.size,)}[self.kind]

    @property
    def dtype(self) -> str:
        return "float32" if self.kind == "box" else "int64"

    def to_env(self, action: np.ndarray) -> np.ndarray:
        """Actions [..., *shape] as the environment counts and scales them, still flat."""
        if self.kind != "box":
            return action + np.asarray(self.starts, np.int64).reshape(self.shape) if any(self.starts) else action
        low = np.array([-np.inf if x is None else x for x in self.low], np.float32)
        high = np.array([np.inf if x is None else x for x in self.high], np.float32)
        bounded = np.isfinite(low) & np.isfinite(high)
        with np.errstate(invalid="ignore"):
            scaled = np.where(bounded, low + (action + 1) / 2 * (high - low), action)
        return np.clip(scaled, low, high).astype(np.float32)

    def to_gym(self, action: np.ndarray) -> np.ndarray:
        """Actions [B, *shape] as `to_env`, boxes in the shape of the environment's own."""
        action = self.to_env(action)
        return action.reshape(-1, *self.box_shape) if self.kind == "box" else action


@dataclass(frozen=True)
class EnvSpec:
    """The spaces of an environment, for networks and buffers. A single observation is the dict {"obs": ...}."""

    id: str
    obs: dict[str, Leaf]
    action: ActionSpec
    clipped: bool = False  # rewards are clipped to [-1, 1] where they train; those of evaluation are not
    mask_from: Literal["", "observation", "info", "method"] = ""  # where the environment says what is legal

    @property
    def masked(self) -> bool:
        """Whether the observations say which actions are legal."""
        return MASK in self.obs and self.obs[MASK].kind == "mask"

    @property
    def seen(self) -> EnvSpec:
        """As the networks see it: a mask decides what they may choose, and is no input of theirs."""
        if not self.masked:
            return self
        return replace(self, obs={name: leaf for name, leaf in self.obs.items() if leaf.kind != "mask"}, mask_from="")


@dataclass(frozen=True)
class Explore:
    """Inputs of exploration; greedy acting has none."""

    rng: torch.Generator
    lane: np.ndarray  # [B] int64: which environments of the whole run these are (a ladder of noise runs over all)


@dataclass(frozen=True)
class ActOutput:
    """Tensors on the CPU, or numpy arrays where an algorithm acts without torch."""

    action: torch.Tensor | np.ndarray  # [B, ...]
    logp: torch.Tensor | np.ndarray  # [B]
    state: Tree  # recurrent state after this step
    extras: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """Named losses, one per parameter group; each backpropagates into its own group only.

    Every loss and `stop` are means, and `weight` is the count that they are divided by: with it, parts of a batch on
    several ranks average to the whole. Metrics are of this rank's rows and may be means over another count.
    """

    losses: dict[str, torch.Tensor]
    metrics: dict[str, torch.Tensor]  # detached scalars; they become numbers once, at the sink
    priorities: torch.Tensor | None = None
    stop: torch.Tensor | None = None  # a scalar: beyond `Algorithm.stop_above` the update ends early (KL limit)
    weight: torch.Tensor | float = 1.0  # live rows (or items) behind the losses; 1: all ranks count the same


class _Unrolls:
    """What plans have in common whose actors hand over unrolls as they are."""

    builds_items: ClassVar[bool] = False
    parts: ClassVar[int] = 1
    refresh: ClassVar[int] = 0  # environment steps of an actor between two looks at the weights; 0: every unroll
    check_every: ClassVar[int] = 1  # updates between two checks that the weights are finite


@dataclass(frozen=True)
class Queue(_Unrolls):
    """Unrolls are trained on once.

    max_lag 0 is synchronous: one unroll of every actor is a batch, and actors and learner wait for each other.
    Above 0 actors run ahead: `batch` unrolls make a batch in the order of arrival, and what is older than `max_lag`
    versions when its turn comes is dropped.
    """

    max_lag: int = 0
    batch: int = 0  # unrolls in a batch; 0: as many as there are actors
    loaders: int = 0  # threads that put batches together ahead of the learner; 0: the learner does it
    buffers: int = 2  # batches in memory that these threads fill in turns

    @property
    def in_turns(self) -> bool:
        """Whether actors and learner take turns."""
        return self.max_lag == 0


@dataclass(frozen=True)
class Circular(_Unrolls):
    """The last `batches` batches of a queue are kept, and each is trained on at most `uses` times (IMPACT)."""

    queue: Queue
    batches: int
    uses: int

    @property
    def in_turns(self) -> bool:
        return self.queue.in_turns


@dataclass(frozen=True)
class Mix(_Unrolls):
    """Each batch of a queue is trained on beside unrolls of earlier ones: `proportion` of them for each new one."""

    queue: Queue
    proportion: float
    ring: int  # unrolls that are kept, over all shards
    shards: int = 1  # rings; actor i adds to ring i % shards
    config: str = "algo.queue"  # where a user sets `replayed` and `ring`, for error messages

    @property
    def in_turns(self) -> bool:
        return self.queue.in_turns


@dataclass(frozen=True)
class Replay:
    """Steps are kept in a memory and trained on many times, as items: n-step transitions, or sequences."""

    memory: ReplayConfig
    gamma: float  # discount, for the n-step sums
    n_step: int = 1
    sequence: int = 0  # rows trained on per item, for recurrent nets; 0: items are transitions
    burn_in: int = 0  # rows before them that only warm the recurrent state up
    overlap: int = 0  # rows that a sequence shares with the next one of its episode
    refresh: int = 0  # environment steps of an actor between two pulls of the weights; 0: every unroll

    builds_items: ClassVar[bool] = True  # actors build items and hand these over
    check_every: ClassVar[int] = 50  # small updates would spend a tenth of their time on it

    @property
    def in_turns(self) -> bool:
        """Whether actors and learner take turns, in a ratio kept exactly."""
        return self.memory.samples_per_insert > 0 and self.memory.slack == 0 and self.parts == 1

    @property
    def parts(self) -> int:
        """Memories that draw as one."""
        return self.memory.shards


@dataclass(frozen=True)
class Transitions:
    """Items of a replay memory, without recurrence. N items; tensors."""

    obs: Tree  # [N, ...]
    action: Any  # [N, ...]
    reward: Any  # [N] float32: sum of discounted rewards over the item's m <= n steps
    discount: Any  # [N] float32: gamma^m, or 0 if the episode terminated within them
    next_obs: Tree  # [N, ...] m steps later: the final observation of an episode, never that of the next
    weight: Any  # [N] float32, importance weight
    version: Any  # [N] int64, weights that acted


@dataclass(frozen=True)
class Sequences:
    """Items of a replay memory for recurrent nets: S = burn_in + sequence rows of one episode each, time-major.

    Rows that an item lacks (before an episode's start, behind its end) are not live and all zero. As in an unroll,
    obs[t+1] is the successor of row t, so an episode's final observation stands in the row behind its last live one.
    """

    obs: Tree  # [S+1, N, ...]
    action: Any  # [S, N, ...]
    reward: Any  # [S, N] float32
    terminated: Any  # [S, N] bool
    truncated: Any  # [S, N] bool
    live: Any  # [S, N] bool
    state: Tree  # [N, ...] recurrent state before the first row; zero where that row is not live
    weight: Any  # [N] float32, importance weight
    version: Any  # [N] int64, weights that acted on the last row


@dataclass(frozen=True)
class DataPlan:
    """The data that an algorithm requires."""

    unroll: int  # T
    chunk: int  # rows between two stored recurrent states; equals `unroll` without recurrence
    table: Queue | Circular | Mix | Replay
    extras: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)  # name -> (shape per step, dtype)
    steps: int = 0  # rows that lanes fill on average, where each may fill its own number of them; 0: all fill all rows


@dataclass(frozen=True)
class Episode:
    """One finished episode, as the actor saw it (rewards before any scaling of ours)."""

    lane: int
    total: float
    length: int
    info: dict[str, float] = field(default_factory=dict)  # numbers that the environment gave at its end


@dataclass
class ActorReport:
    """Report on one unroll, besides the data."""

    steps: int  # live environment steps
    episodes: list[Episode] = field(default_factory=list)
    env_s: float = 0.0
    inference_s: float = 0.0
    total_s: float = 0.0
    cut: bool = False  # the unroll was cut short
    learn_s: float = 0.0  # computing a gradient, where the worker does
    pending: int = 0  # of all steps so far, those still held back: an item of a replay memory needs what comes next
    skipped: int = 0  # of these steps and those held back before, rows that are of no item: some behind a fault
    stale: int = 0  # of these steps, those whose action was chosen by older weights than the unroll's version says


@dataclass
class GradientReport(ActorReport):
    """Report of a worker on a gradient it has computed, and on its replay memory."""

    gradient: bool = False  # whether the slot holds one
    more: bool = False  # whether another one could be drawn without acting
    version: int = 0  # of the weights it was computed on
    loss: float = 0.0
    fresh: int = 0  # environment steps in its batch that were drawn for the first time
    waiting: int = 0  # steps in the memory that were never drawn
    evicted: int = 0  # steps that left it without ever being drawn
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReport:
    """What came out of one update. With several ranks metrics and priorities are those of this rank's own data."""

    metrics: dict[str, float]
    priorities: torch.Tensor | None = None


@dataclass(frozen=True)
class Delivery:
    """What an actor hands over: the arrays it has filled, and its report."""

    actor: int
    sequence: int  # number of the unroll, as the crew counts them for this actor
    arrays: dict[str, np.ndarray]
    report: ActorReport
    release: Callable[[], None]  # gives the memory back; call it once, the arrays are not read after that
    reference: Any = None  # where all arrays are, if only the few that a table decides by are here (a cluster)


@dataclass(frozen=True)
class Failure:
    """An actor, or one environment of it, has failed and is replaced."""

    actor: int
    steps: int  # environment steps that are lost with it
    reason: str  # the ledger's word for them
    message: str
    replaced: bool  # the whole actor is; False: environments of it are recreated, and the others go on


class Sample(NamedTuple):
    """What a table hands to the learner."""

    batch: Any
    versions: np.ndarray  # of the weights that acted, or computed the gradient
    fresh: int  # environment steps that are trained on for the first time
    keys: Any = None  # what the table needs to find the items again
