"""The name that a user may have meant: for an unknown field, flag, verb or recipe.

    nearest("lr", ["algo.lr", "env_steps"])                 # did you mean algo.lr?
    nearest("total_timesteps", ["algo.lr", "env_steps"])    # did you mean env_steps?

Besides likeness, the names of other libraries are known. Not a parser: nothing is replaced.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping

# Stable-Baselines3, RL Zoo, CleanRL, RLlib; of several fields those that the recipe has.
ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "activation_fn": ("net.activation",),
    "batch_size": ("algo.minibatches", "algo.replay.batch"),
    "buffer_size": ("algo.replay.capacity",),
    "clip_coef": ("algo.clip",),
    "clip_param": ("algo.clip",),
    "clip_range": ("algo.clip",),
    "clip_range_vf": ("algo.value_clip",),
    "ent_coef": ("algo.entropy",),
    "entropy_coeff": ("algo.entropy",),
    "env_id": ("env",),
    "eval_freq": ("eval.every",),
    "exploration_final_eps": ("algo.epsilon_end",),
    "exploration_fraction": ("algo.epsilon_share",),
    "gae_lambda": ("algo.lam",),
    "gradient_steps": ("algo.replay.samples_per_insert",),
    "learning_rate": ("algo.lr",),
    "learning_starts": ("algo.replay.min_size",),
    "minibatch_size": ("algo.minibatches",),
    "n_envs": ("envs_per_actor", "actors"),
    "n_epochs": ("algo.epochs",),
    "n_eval_episodes": ("eval.episodes",),
    "n_steps": ("algo.unroll", "algo.n_step"),
    "n_timesteps": ("env_steps",),
    "net_arch": ("net.hidden",),
    "num_env_runners": ("actors",),
    "num_envs": ("envs_per_actor", "actors"),
    "num_epochs": ("algo.epochs",),
    "num_minibatches": ("algo.minibatches",),
    "num_steps": ("algo.unroll",),
    "num_workers": ("actors",),
    "save_freq": ("checkpoint.every",),
    "target_network_frequency": ("algo.target_period",),
    "target_update_interval": ("algo.target_period",),
    "timesteps": ("env_steps",),
    "total_timesteps": ("env_steps",),
    "train_freq": ("algo.replay.samples_per_insert",),
    "update_epochs": ("algo.epochs",),
    "verbose": ("quiet",),
    "vf_coef": ("algo.value_coef",),
}


def nearest(
    name: str, known: Iterable[str], write: Callable[[str], str] = str, otherwise: str = "", count: int = 3
) -> str:
    """A hint with the known names that come nearest; `write` says how one is written.

    First what another library's name stands for, then those with the same last part, then by likeness.
    `otherwise`: the hint if none is near; by default all known names.
    """
    names = {_plain(each): each for each in known}
    asked = _plain(name)
    last = asked.rpartition(".")[2]
    found = [names[each] for each in ELSEWHERE.get(last, ()) if each in names]
    found += [names[each] for each in names if each.rpartition(".")[2] == last]
    if not found:
        found = [names[each] for each in difflib.get_close_matches(asked, names, n=count, cutoff=0.6)]
    if found:
        return f"did you mean {' or '.join(write(each) for each in list(dict.fromkeys(found))[:count])}?"
    return otherwise or "known: " + ", ".join(sorted(write(each) for each in names.values()))


def _plain(name: str) -> str:
    """Case and the choice of dash or underscore do not matter."""
    return name.lstrip("-").replace("-", "_").lower()
