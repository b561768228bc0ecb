"""The blind cliffwalk of the prioritised replay paper (Schaul et al. 2016, §3.1), on Rookery's own replay memory.

    python examples/cliffwalk.py [--out cliffwalk.png]

n states in a row, two actions in each: one moves on, the other ends the episode with reward 0; only the last right one
is rewarded. The memory holds every episode of random play once, in random order, so all but one in 2^n transitions are
about failure. How many updates of tabular Q-learning until the values are right? Drawn uniformly, the one success must
be found by chance; drawn by priority, it is found at once, and what it teaches spreads backwards.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import numpy as np

from rookery.core.config import ReplayConfig
from rookery.core.types import ActionSpec, EnvSpec, Leaf, Replay
from rookery.tables.memory import ReplayMemory

SPEC = EnvSpec("CliffWalk", {"obs": Leaf((1,), "float32", "vector")}, ActionSpec("discrete", (2,), (0,)))
BATCH, STEP, CLOSE, LIMIT = 1, 0.25, 1e-3, 2_000_000


def right(state: np.ndarray | int) -> np.ndarray | int:
    return state % 2


def transitions(n: int) -> np.ndarray:
    """Rows (state, action, reward, next state, ended) of all 2^n ways to play, each until it ends."""
    rows = []
    for actions in itertools.product((0, 1), repeat=n):
        for state, action in enumerate(actions):
            good = action == right(state)
            ended = not good or state == n - 1
            rows.append((state, action, float(good and state == n - 1), min(state + 1, n - 1), ended))
            if ended:
                break
    return np.array(rows)


def memory(n: int, sampler: str, seed: int) -> ReplayMemory:
    rows = transitions(n)
    np.random.default_rng(seed).shuffle(rows)
    count = len(rows)
    config = ReplayConfig(
        capacity=count, min_size=count, batch=BATCH, samples_per_insert=0.0, sampler=sampler, alpha=1.0, beta=0.0,
        beta_end=None,
    )  # fmt: skip
    parcel = {
        "count": np.array([count, 0]),
        "obs/obs": rows[:, :1].astype(np.float32),
        "action": rows[:, 1].astype(np.int64),
        "reward": rows[:, 2].astype(np.float32),
        "discount": ((1 - 1 / n) * (1 - rows[:, 4])).astype(np.float32),
        "next_obs/obs": rows[:, 3:4].astype(np.float32),
        "version": np.zeros(count, np.int64),
        "steps": np.ones(count, np.int32),
        "priority": np.full(count, np.nan, np.float32),
    }
    shapes = {path: (array.shape, str(array.dtype)) for path, array in parcel.items()}
    table = ReplayMemory(Replay(config, 1 - 1 / n), shapes, SPEC, actors=1, seed=seed)
    table.insert(parcel, 0)
    return table


def updates_needed(n: int, sampler: str, seed: int) -> int:
    """Updates until the mean squared error of all values is below 0.001."""
    table, rng = memory(n, sampler, seed), np.random.default_rng(seed)
    truth = np.zeros((n, 2))
    truth[np.arange(n), right(np.arange(n))] = (1 - 1 / n) ** np.arange(n - 1, -1, -1)
    value = rng.normal(0, 0.1, (n, 2))
    for update in range(1, LIMIT + 1):
        sample = table.sample()
        batch = sample.batch
        state, action = int(batch.obs["obs"][0, 0]), int(batch.action[0])
        target = float(batch.reward[0]) + float(batch.discount[0]) * value[int(batch.next_obs["obs"][0, 0])].max()
        error = target - value[state, action]
        value[state, action] += STEP * error
        table.update(sample.keys, np.array([abs(error) + 1e-6]))
        if update % 16 == 0 and np.mean((value - truth) ** 2) < CLOSE:
            return update
    return LIMIT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="cliffwalk.png")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 6, 8, 10])
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    for sampler, colour in (("uniform", "#888888"), ("rank", "#d08020"), ("proportional", "#2070b0")):
        needed = [[updates_needed(n, sampler, seed) for seed in range(args.seeds)] for n in args.sizes]
        items = [len(transitions(n)) for n in args.sizes]
        axes.plot(items, [statistics.median(x) for x in needed], "o-", color=colour, label=sampler)
        axes.fill_between(items, [min(x) for x in needed], [max(x) for x in needed], color=colour, alpha=0.15)
        for n, count, each in zip(args.sizes, items, needed):
            print(f"{sampler:>13} n={n:2d} {count:6d} items: {statistics.median(each):9,.0f} updates {each}")
    axes.set(xscale="log", yscale="log", xlabel="transitions in the memory", ylabel="updates until values are right")
    axes.set_title(f"Blind cliffwalk: median of {args.seeds} seeds, shaded from fewest to most", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.out, dpi=150)
    print(args.out)


if __name__ == "__main__":
    main()
