"""The description of a run: frozen dataclasses, one line of doc per field, written to config.json as they are.

The command line, Python and config.json use these fields and no others; an unknown one is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

from msgspec import Meta

from rookery.core.ranges import Count, NotNegative, Positive, Share, Whole

AlgoConfig = TypeVar("AlgoConfig")
Topology = Literal["auto", "serial", "local", "async_grads", "allreduce", "ray_cluster"]
Tracker = Literal["wandb", "mlflow", "trackio"]
CHANGES = 100  # resumes that `history` keeps; older ones are in metrics.jsonl
Torso = Literal["auto", "mlp", "tiny", "compact", "nips", "nature", "impala", "resnet"]


@dataclass(frozen=True)
class AtariConfig:
    """Frame and reward options of ALE environments (ignored elsewhere)."""

    frame_skip: Count = 4  # emulator frames per step; the last two are max-pooled
    stack: Count = 4  # frames per observation
    size: Count = 84  # side of the square grey frame
    noop_max: Whole = 30  # random no-ops after a reset
    episodic_life: bool = False  # a lost life ends the episode (in training only)
    fire_reset: bool = True  # press FIRE after a reset where the game needs it
    reward_clip: bool = True  # clip the summed reward to [-1, 1] (in training only)
    sticky: Share = 0.0  # probability that the previous action is repeated; ALE v5 ids say 0.25
    max_frames: Count = 108_000  # emulator frames per episode, then truncated
    full_actions: bool = False  # all 18 actions instead of the game's own


@dataclass(frozen=True)
class NetConfig:
    """The network. Recurrence is a property of the network, not of the algorithm."""

    torso: Torso = "auto"  # auto: mlp for vectors; nature or, if they are small, tiny for images
    hidden: tuple[Count, ...] = (64, 64)  # MLP layers
    activation: Literal["tanh", "relu"] = "tanh"  # MLP activation
    features: Whole = 512  # width of the layer behind a CNN; 0: no such layer
    standardize: bool = False  # each image gets mean 0 and deviation 1: small things on a grey ground stand out
    shared: bool = False  # policy and value share torso (always so for images and recurrence)
    core: Literal["none", "gru", "lstm"] = "none"  # recurrent core
    core_size: Count = 128  # units of the core
    core_layers: Count = 1  # layers of the core
    feed_last: bool = False  # the last action (one-hot or box) and last reward are observations too
    action_mask: Literal["auto", "info", "off"] = "auto"  # legal actions: from wherever they are told; from `info`; off
    normalize_obs: bool = False  # running mean and deviation of vector observations, part of the weights
    log_std: float = 0.0  # start of the Gaussian's log deviation (box actions)
    state_std: bool = False  # deviation depends on the observation
    squash: bool = False  # tanh-squashed Gaussian
    precision: Literal["fp32", "bf16"] = "fp32"  # arithmetic of the torso; heads and cores stay fp32
    module: str = ""  # "package.module:Class" of a torso of your own


@dataclass(frozen=True)
class ReplayConfig:
    """A replay memory: what is kept, what is drawn, and how often. An item is a transition, or a sequence."""

    capacity: Count = 1_000_000  # items
    min_size: Count = 50_000  # items before the first update
    batch: Count = 32  # items per update
    samples_per_insert: NotNegative = 8.0  # mean draws of an item; 0: actors and learner never wait (Ape-X)
    slack: NotNegative = 0.0  # items by which draws may differ from that ratio before actors or learner wait
    sampler: Literal["uniform", "proportional", "rank"] = "uniform"  # how items are drawn
    alpha: NotNegative = 0.6  # exponent of the priorities
    beta: NotNegative = 0.4  # exponent of the importance weights
    beta_end: NotNegative | None = 1.0  # exponent at the end of the run, reached linearly; none: constant
    weights: Literal["batch", "memory", "raw"] = "batch"  # largest weight is 1 in the batch, in the memory, or as it is
    start: Literal["max", "actor"] = "max"  # priority of a new item: the largest so far, or the actor's own estimate
    remover: Literal["fifo", "soft", "inverse"] = "fifo"  # oldest first; oldest first and late; low priorities first
    remove_alpha: float = -0.4  # exponent of the priorities for remover "inverse"
    remove_every: Count = 100  # updates between two removals of what exceeds a soft capacity
    prefetch: Count = 4  # batches drawn ahead of the learner, where actors and learner run asynchronously
    loaders: Whole = 1  # threads that draw them; 0: the learner draws its batches itself
    compress: bool = False  # keep frames compressed: less memory, slower draws
    save: bool = True  # the memory is part of checkpoints
    shards: Count = 1  # parts of the memory, each with its own actors (topology ray_cluster)


@dataclass(frozen=True)
class QueueConfig:
    """How unrolls reach a learner that does not wait for its actors."""

    lag: Whole = 1  # batches that actors may run ahead: no new data is older, in updates; 0: synchronous
    batch: Whole = 0  # unrolls in a batch; 0: as many as there are actors
    replayed: NotNegative = 0.0  # unrolls of earlier batches that are trained on beside each new one
    ring: Count = 64  # unrolls that are kept for that
    loaders: Whole = 1  # threads that put batches together ahead of the learner; 0: the learner does it
    buffers: Count = 2  # batches in memory that these threads fill in turns


@dataclass(frozen=True)
class AutoencoderConfig:
    """An auto-encoder in the policy's network: the policy reads a small code, from which a decoder reconstructs."""

    on: bool = False  # whether there is one
    latent: Count = 64  # width of the code
    weight: NotNegative = 1.0  # of the reconstruction loss
    stop: Literal["none", "policy", "reconstruction"] = "none"  # whose gradient does not reach the encoder
    freeze: Share = 1.0  # share of the run after which the encoder is not trained any more


@dataclass(frozen=True)
class AuxConfig:
    """Auxiliary tasks of UNREAL (Jaderberg et al. 2017), learnt beside the policy; a weight of 0 leaves one out."""

    pixel_control: NotNegative = 0.0  # weight: values of changing each part of the image
    reward_prediction: NotNegative = 0.0  # weight: the sign of the next reward, from three observations
    value_replay: NotNegative = 0.0  # weight: the value loss once more, on replayed unrolls
    cell: Count = 4  # pixels per side of the parts that pixel control looks at
    gamma: Share = 0.9  # discount of pixel control
    replayed: NotNegative = 1.0  # replayed unrolls for each new one; the tasks are learnt from these. 0: from new ones
    ring: Count = 100  # unrolls that are kept for that, by each worker


@dataclass(frozen=True)
class SupervisorConfig:
    """How long to wait, and how often to try again."""

    step_deadline: Positive = 60.0  # seconds one vector step may take before its worker counts as hung
    start_deadline: Positive = 180.0  # seconds a worker may take to start and reset its environments
    restarts: Whole = 3  # replacements of one worker within `window`, then the run stops
    window: Positive = 600.0  # seconds
    grace: NotNegative = 30.0  # seconds for the last checkpoint after a signal
    spare: bool = True  # keep one process with all libraries loaded, so that a worker is replaced without delay


@dataclass(frozen=True)
class GradientConfig:
    """Gradients that workers send (topology async_grads, or ray_cluster)."""

    by_workers: bool = False  # topology ray_cluster: workers learn by themselves and send gradients
    max_age: Whole = 50  # updates since the weights that a gradient was computed on; an older one is dropped
    outlier: NotNegative = 0.0  # mean deviations above the usual loss beyond which a gradient is dropped; 0: never


@dataclass(frozen=True)
class GroupConfig:
    """Several learners that train together (topology allreduce)."""

    crew: Literal["inline", "processes", "ready"] = "inline"  # who acts in a rank: itself; actor processes; see VER
    workers: Whole = 0  # crew ready: processes that step the environments; 0: one for each environment
    timeout: Positive = 300.0  # seconds that a rank waits for the others in one exchange
    join: Positive = 30.0  # seconds to find each other at the start
    preempt: Share = 1.0  # share of the ranks that have finished their rollout when the others stop theirs; 1: never
    preempt_after: Share = 0.25  # of a rollout that every rank completes


@dataclass(frozen=True)
class RayConfig:
    """Actors on a Ray cluster (topology ray_cluster)."""

    address: str = ""  # "host:port" of a cluster, or "auto"; empty: start one on this machine for this run only
    cpus_per_actor: Positive = 1.0  # CPUs that Ray reserves for each actor
    cpus_per_shard: Positive = 1.0  # CPUs that Ray reserves for each part of a replay memory (algo.replay.shards)
    least: Whole = 0  # actors that are enough to go on while there is no room for the others; 0: all of them
    aggregators: Whole = 0  # Ray actors that put batches together for the learner; 0: it does so itself
    cpus_per_aggregator: Positive = 1.0  # CPUs that Ray reserves for each of them
    store_gib: NotNegative = 0.0  # object store of a cluster that is started, in GiB; 0: Ray's choice


@dataclass(frozen=True)
class CheckpointConfig:
    every: Count = 100_000  # environment steps between two checkpoints
    keep: Count = 3  # newest ones kept, besides the best
    minutes: Positive = 10.0  # minutes after which one is written though `every` is not reached


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation while the run trains: whole episodes, greedy, unclipped rewards, seeds of its own."""

    every: Whole = 0  # environment steps between two evaluations; 0: none
    episodes: Count = 20  # whole episodes of one evaluation
    envs: Count = 8  # environments played together, at most: every one plays the same number of episodes
    seed: int = 8  # of the environments, the same in every evaluation; another one than `rookery eval` takes
    epsilon: Share = 0.0  # share of actions drawn at random (discrete actions)
    stop: bool = False  # target_return is for the mean of an evaluation, which ends the run
    minutes: Positive = 10.0  # an evaluation that takes longer is given up


@dataclass(frozen=True)
class InitFrom:
    """The checkpoint whose networks a run began with: a record. It is read when the run begins, and never again."""

    run: str  # folder of that run
    checkpoint: str  # the checkpoint in it
    env_steps: Whole  # environment steps behind these weights
    digest: str  # of the checkpoint's tensors


@dataclass(frozen=True)
class Resumed:
    """A resume that changed fields of the run."""

    env_steps: Whole  # where the run went on
    time: str  # when, in UTC
    version: str  # of Rookery
    changed: dict[str, tuple[Any, Any]]  # dotted path -> value before, value from there on


@dataclass(frozen=True)
class RunConfig(Generic[AlgoConfig]):
    """Everything that defines a run."""

    recipe: str  # name of the recipe
    algorithm: str  # import path of the algorithm, "package.module:Class"
    env: str  # Gymnasium id, ALE/... id, dmc/... task, or "package.module:factory"
    algo: AlgoConfig  # the algorithm's own numbers
    net: NetConfig = field(default_factory=NetConfig)
    atari: AtariConfig = field(default_factory=AtariConfig)
    env_kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the environment
    preset: str = ""  # which row of the recipe's table was taken
    env_steps: Count = 100_000  # length of the run, in environment steps
    seed: int = 1  # root of every random stream
    out: str = ""  # run folder; empty: runs/<recipe>-<env>-<seed>-<time>
    topology: Topology = "auto"  # where actors run; auto: serial or local, by what a step of the environment costs
    ranks: Count = 1  # learners that train together, each with its own actors (topology allreduce, ray_cluster)
    actors: Count = 1  # actors (of each rank), each with envs_per_actor environments
    envs_per_actor: Count = 8  # environments stepped together by one actor
    device: Literal["cpu", "cuda"] = "cpu"  # where the learner computes
    threads: Whole = 0  # threads the learner computes with; 0: every core, or one if the work is small
    compile: bool = False  # torch.compile the loss
    target_return: float | None = None  # stop when the mean of the last 100 episodes reaches it; see eval.stop
    metrics_from_info: tuple[str, ...] = ()  # numbers (or dicts of them) in `info` at an episode's end; none: declared
    track: tuple[Tracker, ...] = ()  # experiment trackers that get the records too
    track_project: str = ""  # project or experiment there; empty: what their environment variables say, or "rookery"
    quiet: bool = False  # no panel
    log_every: NotNegative = 1.0  # seconds between two records in metrics.jsonl
    fault_plan: str = ""  # e.g. "actor[1]@env_step=137:sigkill"; for tests of your own reliability
    debug: bool = False  # poison freed slots, check more
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    gradients: GradientConfig = field(default_factory=GradientConfig)
    group: GroupConfig = field(default_factory=GroupConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    init_from: InitFrom | None = None  # the checkpoint whose networks it began with; none: random weights
    history: Annotated[list[Resumed], Meta(max_length=CHANGES)] = field(default_factory=list)  # resumes with changes

    @property
    def lanes(self) -> int:
        """Environments in the whole run."""
        return self.ranks * self.actors * self.envs_per_actor


def nameless(env: str) -> bool:
    """Whether this stands for an object of a Python program that nothing can import, as "<lambda>" does."""
    return re.fullmatch(r"<[^<>:]*>", env) is not None
