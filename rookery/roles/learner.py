"""The learner: prepare → minibatches → gradients → (reduce) → apply → publish.

A gradient is a value: `gradients` fills one flat vector per parameter group, `apply` steps the optimiser with it.
What the literature calls another algorithm happens between the two. Nothing non-finite passes: a bad gradient is
skipped and counted, three in a row end the run.

With several ranks each minibatch costs one collective (`exchange.py`), and whether it is applied, skipped or ends the
update is decided from the sums of all ranks: weights and counts stay the same on every rank. Metrics are of this
rank's own rows, except the gradient norms, which are those of the whole.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch

from rookery.algorithms.base import Algorithm
from rookery.core import tree
from rookery.core.errors import NumericError
from rookery.core.reduce import ALONE, Reduce
from rookery.core.seeding import seed_of
from rookery.core.types import LossOutput, StepReport
from rookery.core.wording import setting
from rookery.nets.flat import FlatParams
from rookery.roles.exchange import Exchange
from rookery.roles.weights import Published

SKIPS_IN_A_ROW = 3


class Learner:
    def __init__(
        self, algorithm: Algorithm, seed: int, device: str = "cpu", compile: bool = False, reduce: Reduce = ALONE
    ):
        """`seed` must be the same on every rank: first weights and the order of minibatches come from it."""
        torch.manual_seed(seed_of(seed, "nets"))
        self.algorithm, self.device, self.reduce = algorithm, torch.device(device), reduce
        self.nets = algorithm.nets().to(self.device)
        self.flat = {
            group: FlatParams([self.nets[name] for name in names if name in self.nets])
            for group, names in algorithm.groups.items()
        }
        self.optimizers = algorithm.optimizers({group: flat.parameter for group, flat in self.flat.items()})
        self.published = Published(algorithm, self.nets, list(self.flat.values()))
        self._exchange = None if reduce.size == 1 else Exchange(reduce, self.flat)
        self._losses = torch.compile(algorithm.losses) if compile else algorithm.losses
        self._rng, self._seed = torch.Generator(), seed
        self.version = 0  # updates on whole batches; the version of the weights
        self.updates = 0  # optimiser steps
        self.skipped = 0  # updates refused because they were not finite
        self._skips: list[dict[str, Any]] = []  # those refused in a row: what was not finite, and the losses
        self._loss: dict[str, torch.Tensor] = {}  # behind the gradient that was filled last
        self.check_every = algorithm.plan().table.check_every  # updates; gradients are checked every time
        self._checked = -1  # version that was found to be finite
        self._due = tuple(self.flat)  # groups whose gradient was filled last
        self.fixed_lr: dict[str, float] = {}  # by group: step sizes that a callback has set, instead of the schedule's
        self.spoil: Callable[[int], bool] = lambda updates: False  # faults on purpose: spoil this update's gradient?

    def step(self, batch: Any, progress: float, tell: bool = True) -> StepReport:
        """One whole update on a batch; `progress` in [0, 1] is the share of the run that lies behind.

        Metrics are computed only if `tell` is set.
        """
        algorithm = self.algorithm
        self._schedule(progress)
        if self.device.type != "cpu":
            batch = tree.map_fields(batch, lambda x: x.to(self.device, non_blocking=True))
        self._rng.manual_seed(seed_of(self._seed, "minibatches", self.version))
        metrics: list[dict[str, torch.Tensor]] = []
        output, norms, minibatch = LossOutput({}, {}), {}, None
        try:
            prepared = algorithm.prepare(self.nets, batch, self.reduce)
            for minibatch in algorithm.minibatches(prepared, self._rng, self.reduce):
                output = self.gradients(minibatch)
                stop, fault = self._agreed(output)
                if stop > algorithm.stop_above:
                    break
                norms = self._skip(*fault) if fault else self.apply()
                if norms:  # what was skipped is counted, and not told: it is not finite
                    metrics.append(output.metrics | norms)
        except NumericError as error:
            error.evidence = {"batch": batch, "minibatch": minibatch}
            raise
        self.version += 1
        if self.version % self.check_every == 0:
            self.check_finite()
        algorithm.after_update(self.nets, self.version)
        algorithm.observe(self.nets, batch, self.reduce)
        # Those of an update that was skipped are worth nothing.
        priorities = None if output.priorities is None or not norms else output.priorities.cpu()
        return StepReport(self._means(metrics) if tell else {}, priorities)

    def first_gradients(self, batch: Any, progress: float) -> LossOutput:
        """Fill the flat gradients from the first minibatch of a batch, and leave their application to others."""
        self._schedule(progress)  # of the losses; the learning rate is the applier's
        self._rng.manual_seed(seed_of(self._seed, "minibatches", self.version))
        prepared = self.algorithm.prepare(self.nets, batch, self.reduce)
        return self.gradients(next(self.algorithm.minibatches(prepared, self._rng, self.reduce)))

    def accept(self, gradient: torch.Tensor, progress: float) -> dict[str, torch.Tensor]:
        """One update with a gradient that was computed elsewhere: the groups one after the other in one vector."""
        self._schedule(progress)
        self._due, at = tuple(self.flat), 0
        for flat in self.flat.values():
            flat.grad.copy_(gradient[at : at + flat.grad.numel()])
            at += flat.grad.numel()
        self._loss = {}
        self._spoiled()
        norms = self.apply()
        self.version += 1
        if self.version % self.check_every == 0:
            self.check_finite()
        self.algorithm.after_update(self.nets, self.version)
        return norms

    def _schedule(self, progress: float) -> None:
        for group, lr in (self.algorithm.schedule(progress) | self.fixed_lr).items():
            for param_group in self.optimizers[group].param_groups:
                param_group["lr"] = lr

    def gradients(self, batch: Any) -> LossOutput:
        """Fill the flat gradients; each named loss moves its own group only. None: no rows here, no gradient."""
        output = LossOutput({}, {}, weight=0) if batch is None else self._losses(self.nets, batch)
        self._due, self._loss = tuple(output.losses), output.losses
        for group, loss in output.losses.items():
            self.flat[group].zero_grad()
            if len(self.flat) == 1:
                loss.backward()
            else:
                loss.backward(inputs=self.flat[group].parameters, retain_graph=group != self._due[-1])
        return output

    @torch.no_grad()
    def apply(self) -> dict[str, torch.Tensor]:
        """Clip and step, group by group; returns the gradient norms. A non-finite gradient is skipped."""
        norms = {}
        for group in self._due:
            flat = self.flat[group]
            norm = torch.linalg.vector_norm(flat.grad)
            value = norm.item()
            if not math.isfinite(value):
                return self._skip(f"the gradient of group '{group}'", value)
            if value > self.algorithm.max_grad_norm:
                flat.grad.mul_(self.algorithm.max_grad_norm / (value + 1e-6))
            norms["grad_norm" if len(self.flat) == 1 else f"grad_norm_{group}"] = norm
        for group in self._due:
            self.optimizers[group].step()
        self.updates += 1
        if self._skips:
            self._skips = []
        return norms

    def _agreed(self, output: LossOutput) -> tuple[float, tuple[str, float] | None]:
        """The stopping criterion, and why the gradient must not be applied although it may be finite; of all ranks.

        With several ranks the gradients become those of all.
        """
        spoiled, fault = self._spoiled(), None
        # Gradients of a Huber loss are finite, whatever the errors behind them.
        errors = 0.0 if output.priorities is None else float(output.priorities.sum())
        if not math.isfinite(errors):
            fault = ("the sum of errors", errors)
        if self._exchange is None:
            if self.algorithm.stop_above == math.inf:
                return -math.inf, fault
            assert output.stop is not None  # an algorithm with a limit says how near it is
            return float(output.stop), fault
        stop, faulty, self._due = self._exchange(output, spoiled or fault is not None)
        if faulty and fault is None:
            fault = ("the gradient" if spoiled else "the gradient of another rank", math.nan)
        return stop, fault

    def _spoiled(self) -> bool:
        """Make the gradient useless if a fault is to be injected here."""
        if not self.spoil(self.updates):
            return False
        for group in self._due:
            self.flat[group].grad.fill_(math.nan)
        return True

    def _skip(self, what: str, value: float) -> dict[str, torch.Tensor]:
        """Count an update that is not applied. Returns the gradient norms of it: none."""
        self.skipped += 1
        losses = {group: float(loss.detach()) for group, loss in self._loss.items()}
        self._skips.append({"what": what, "value": value, "version": self.version, "losses": losses})
        if len(self._skips) >= SKIPS_IN_A_ROW:
            raise NumericError(
                f"{what} was {value} {SKIPS_IN_A_ROW} times in a row (update {self.updates}); "
                f"the weights are untouched. Try a smaller {setting('algo.lr')}, {setting('algo.max_grad_norm')}, or "
                f"{setting('net.normalize_obs', True)}",
                self._skips,
            )
        return {}

    def _means(self, metrics: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Averages over the minibatches, as numbers, with one transfer."""
        most: dict[str, torch.Tensor] = max(metrics, key=len, default={})
        names = list(most)
        # Some metrics are of some minibatches only: with several ranks there may be some without a row of this one.
        some = any(len(each) < len(names) for each in metrics)
        mean, unknown = (torch.nanmean if some else torch.mean), torch.tensor(math.nan, device=self.device)
        rows = [torch.stack([m.get(name, unknown) for name in names]) for m in metrics]
        means = mean(torch.stack(rows), 0).tolist() if rows else []
        lr = next(iter(self.optimizers.values())).param_groups[0]["lr"]
        return dict(zip(names, means)) | {"lr": float(lr), "minibatches": len(rows)}

    def check_finite(self) -> None:
        if not self.finite():
            raise NumericError("the weights are no longer finite; they were not published, the last checkpoint is good")
        self._checked = self.version

    def ensure_finite(self) -> None:
        """Check the weights of this version, unless that was done."""
        if self._checked != self.version:
            self.check_finite()

    def digest(self) -> int:
        """Of the weights: the same on every rank of a group."""
        digest = 0
        for flat in self.flat.values():
            digest = zlib.crc32(flat.parameter.detach().cpu().numpy().data, digest)
        return digest

    def finite(self) -> bool:
        """Whether weights and optimiser state are. (The normaliser's bounds are not, before its first update.)"""
        states = [t for optimizer in self.optimizers.values() for s in optimizer.state.values() for t in s.values()]
        return all(math.isfinite(float(t.sum())) for t in (*(flat.data for flat in self.flat.values()), *states))

    def read(self) -> torch.Tensor:
        """A copy of the weights that actors receive."""
        return self.published.read()

    # State, as flat names → tensors and numbers

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors = {f"nets/{name}": value for name, value in self.nets.state_dict().items()}
        for group, optimizer in self.optimizers.items():
            for name, value in optimizer.state[self.flat[group].parameter].items():
                tensors[f"optimizer/{group}/{name}"] = torch.as_tensor(value)
        numbers = {"version": self.version, "updates": self.updates, "skipped": self.skipped}
        return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}, numbers

    def load(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        nets = {name.removeprefix("nets/"): t for name, t in tensors.items() if name.startswith("nets/")}
        self.nets.load_state_dict(nets)
        for group, optimizer in self.optimizers.items():
            prefix = f"optimizer/{group}/"
            state = {n.removeprefix(prefix): t.clone() for n, t in tensors.items() if n.startswith(prefix)}
            if state:
                parameter = self.flat[group].parameter
                # A fused optimiser counts its steps where the parameters are, any other one on the CPU.
                stay = () if optimizer.defaults.get("fused") else ("step",)
                optimizer.state[parameter] = {n: t if n in stay else t.to(self.device) for n, t in state.items()}
        self.version, self.updates, self.skipped = numbers["version"], numbers["updates"], numbers["skipped"]
        self._checked = -1
