"""What a table holds when a run goes on from a checkpoint, and the steps that did not come along."""

from __future__ import annotations

from shlex import quote

import torch

from rookery.core.errors import CheckpointError
from rookery.tables.table import Table
from rookery.topologies.job import Job
from rookery.topologies.replay_saver import ReplaySaver, Saver


def restore_table(job: Job, table: Table, saver: Saver | None = None) -> None:
    """Fill a fresh table, and settle the ledger: of what was in flight at the checkpoint, the rest is lost.

    `saver`: of its memory, if that is not in this process.
    """
    journal = job.journal
    journal.pending = {
        actor: int(state["pending"]) for actor, state in enumerate(job.states) if state and "pending" in state
    }
    if table.memory is not None:
        saver = ReplaySaver(job.own_folder, table.memory, table.snapshot, journal.say)
    if saver is not None:
        job.saver = saver
        _restore_memory(job, saver, table)
    elif table.rounds:
        _check_in_step(job)
    kept, known = table.steps + sum(journal.pending.values()), journal.whole.in_flight
    if not job.alone:
        kept = int(job.learner.reduce.sum(torch.tensor([kept])))
    if kept > known:
        raise CheckpointError(
            f"{kept} environment steps wait in the replay memory and with the actors, and the checkpoint knows of "
            f"{known}: the two are not of one run. Go on with an empty memory: "
            f"rm -r {quote(str(job.folder / 'replay'))}"
        )
    if job.rank == 0:  # it goes on with the books of the run
        journal.settle(kept)
    table.losses()  # evictions of earlier lives are in the ledger


def _restore_memory(job: Job, saver: Saver, table: Table) -> None:
    """Load the memory saved with the checkpoint, or the nearest one; if there is none, it starts empty."""
    if job.resumed_at is None:
        return
    same = saver.restore(job.resumed_at, job.learner.version, job.warn)
    if not same or not job.states:  # frame numbers of the actors do not continue those in this memory
        for actor in range(job.config.actors):
            table.lost(actor)


def _check_in_step(job: Job) -> None:
    """Where a batch is one unroll of every actor, all are at the same one."""
    if not job.states:  # one may lag behind, if its actor failed at the end: all start new episodes together
        job.sequences = [max(job.sequences)] * len(job.sequences)
    elif len(set(job.sequences)) > 1:
        raise CheckpointError(f"the checkpoint's actors are at unrolls {job.sequences[:8]}: not at the same one")
