"""The calculator of clusters: Ape-X's published rates, exact cases, shapes that travel, and what it refuses."""

import dataclasses
import math

import pytest

import rookery
from rookery.core.errors import UsageError
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.run.cluster_plan import LEARNING, Nodes, Rates, Replayed, Work, planned
from rookery.run.cluster_work import measure, spec_of, work_of

PONG = EnvSpec("Pong", {"obs": Leaf((4, 84, 84), "uint8", "image", stack=4)}, ActionSpec("discrete", (6,), (0,)))
CARTPOLE = EnvSpec("CartPole-v1", {"obs": Leaf((4,), "float32", "vector")}, ActionSpec("discrete", (2,), (0,)))
FAST = Nodes(cores=64, memory_gib=256, gbit_per_s=100)


def queue(**fields) -> Work:
    numbers = {
        "in_turns": False,
        "steps": 100,
        "bytes": 1_000_000,
        "floats": 1_000_000,
        "batch_steps": 1000.0,
    }
    return Work("any", "any", "unrolls", **numbers | fields)


def replay(memory_bytes: int = 2**30, samples_per_insert: float = 8.0, batch: int = 32, **fields) -> Work:
    memory = Replayed(memory_bytes, 1.0, batch, samples_per_insert, item_bytes=10_000)
    steps = batch / samples_per_insert if samples_per_insert else 0.0
    return dataclasses.replace(queue(batch_steps=steps), what="items", replay=memory, **fields)


def apex() -> Work:
    """The paper's Ape-X: 360 actors with one environment each."""
    return work_of(rookery.configure("apex_dqn", "ALE/Pong-v5", actors=360, envs_per_actor=1), PONG)


def test_the_rates_of_ape_x_are_found():
    """Horgan et al. 2018: 360 actors at about 139 frames/s, four a step; about 19 batches of 512 a second."""
    plan = planned(apex(), Rates(actor_steps_per_s=139 / 4, learner_s=1 / 19, draws_per_s=20_000), FAST, 12_500)
    assert plan.actors == pytest.approx(360, rel=0.01)
    assert plan.inserts_per_s == pytest.approx(12_500, rel=0.02)
    assert plan.draws_per_s == pytest.approx(9_700, rel=0.02)
    assert plan.draws_per_s / plan.inserts_per_s == pytest.approx(0.78, abs=0.01)
    assert (plan.learners, plan.updates_needed, plan.shards) == (1, None, 1)  # as in the paper: nobody waits
    assert 4 * 360 * plan.steps_per_s / 360 == pytest.approx(50_000)  # frames/s


def test_ape_x_moves_what_its_arrays_take():
    """50 rows of one environment: 50 frames and 50 items on average; the room for more does not travel."""
    work = apex()
    item = 4 * 8 * 2 + 8 + 4 + 4 + 8 + 4 + 4  # frame numbers twice, action, reward, discount, version, steps, priority
    assert work.bytes == pytest.approx(50 * (84 * 84 + item), rel=0.01)
    assert (work.steps, work.what, work.publish_s, work.refresh) == (50, "items", 0.1, 800)
    assert work.replay is not None
    assert work.replay.item_bytes == 2 * 4 * 84 * 84 + item - 2 * 4 * 8  # frames in the place of their numbers
    assert work.replay.memory_bytes == pytest.approx(2.5e6 * 7_200, rel=0.05)  # a soft capacity has a quarter more
    convolutions = 4 * 32 * 64 + 32 + 32 * 64 * 16 + 64 + 64 * 64 * 9 + 64
    streams = 2 * (3136 * 512 + 512) + 513 + 6 * 513  # dueling
    assert work.floats == pytest.approx(convolutions + streams, rel=1e-4)  # beside these, what acting is told


def test_unrolls_and_gradients_are_counted_too():
    config = rookery.configure("ppo", "CartPole-v1", actors=4, envs_per_actor=2)
    work = work_of(config, CARTPOLE)
    rows = config.algo.unroll
    assert work.steps == 2 * rows and work.batch_steps == 4 * 2 * rows and work.in_turns
    assert work.bytes == 2 * ((rows + 1) * 16 + rows * (8 + 4 + 3 + 4) + 16)
    a3c = work_of(rookery.configure("a3c", "CartPole-v1"), CARTPOLE)
    assert (a3c.what, a3c.bytes, a3c.replay) == ("gradients", 4 * a3c.floats, None)
    gorila = rookery.configure("gorila", "CartPole-v1")
    assert work_of(gorila, CARTPOLE).batch_steps == gorila.algo.replay.batch / gorila.algo.replay.samples_per_insert
    circular = rookery.configure("impact", "CartPole-v1")
    assert work_of(circular, CARTPOLE).uses == circular.algo.circular.uses


def test_a_queue_by_hand():
    rates = Rates(actor_steps_per_s=100, learner_s=0.05)
    plan = planned(queue(ahead=2), rates, Nodes(cores=10, memory_gib=64, gbit_per_s=10), 10_000)
    assert (plan.actors, plan.actor_nodes, plan.learners, plan.nodes) == (100, 10, 1, 11)
    assert (plan.handovers_per_s, plan.updates_per_s, plan.updates_needed) == (100, 10, 10)
    assert plan.learner_share == pytest.approx(0.5)
    assert plan.learner_in == pytest.approx(1e8) and plan.bytes_per_step == 10_000
    assert plan.versions_per_s == 10 and plan.weights_bytes == 4_000_000
    assert plan.weights_out == pytest.approx(4e6 * 10 * 10)  # every node fetches each of the 10 versions/s
    assert plan.store_gib * 2**30 == pytest.approx(100 * 2 * 1e6 + 4e6 * 102)
    assert plan.limits[0].name == "the learner" and "fits" in plan.verdict


def test_a_node_fetches_no_more_versions_than_it_gets_orders():
    """Two actors on each of 50 nodes take 2 orders/s together: 10 versions/s are published, 2 of them fetched."""
    plan = planned(queue(), Rates(100, 0.05), Nodes(cores=2), 10_000)
    assert plan.weights_out == pytest.approx(4e6 * 2 * 50)


def test_an_actor_that_refreshes_rarely_fetches_rarely():
    plan = planned(queue(refresh=1000), Rates(100, 0.05), Nodes(cores=10), 10_000)
    assert plan.versions_per_s == 10 and plan.weights_out == pytest.approx(4e6 * 10)  # a node asks once per second


def test_weights_that_are_published_now_and_then():
    plan = planned(replay(samples_per_insert=0.0, publish_s=0.5), Rates(100, 0.01, 1e6), FAST, 1000)
    assert plan.versions_per_s == 2 and plan.updates_per_s == pytest.approx(100)


def test_in_turns_actors_make_up_for_the_learning():
    """A second of 5,000 steps: 0.25 s are learning, so that acting has 0.75 s, and needs 67 actors instead of 50."""
    rates = Rates(actor_steps_per_s=100, learner_s=0.05)
    plan = planned(queue(in_turns=True), rates, FAST, 5000)
    assert plan.learner_share == pytest.approx(0.25) and plan.actors == math.ceil(5000 / 75)
    assert plan.versions_per_s == pytest.approx(5000 / 100 / plan.actors)  # one per round of all actors
    more = planned(queue(in_turns=True), rates, FAST, 50_000)
    assert more.learners == math.ceil(50_000 / (20_000 * LEARNING)) and more.learner_share < LEARNING


def test_a_learner_that_is_too_slow_is_said():
    plan = planned(queue(), Rates(100, 0.5), FAST, 10_000)
    assert plan.learners == 5 and "One learner does not carry" in plan.verdict and "--ranks 5" in plan.verdict
    workers = planned(dataclasses.replace(queue(), what="gradients"), Rates(100, 0.5), FAST, 10_000)
    assert workers.learners == 1 and workers.limits[0].share == pytest.approx(5) and "not fit" in workers.verdict
    assert workers.updates_per_s == pytest.approx(2)  # what it makes, and not what would be needed


def test_items_that_are_hardly_ever_drawn_are_said():
    slow = planned(apex(), Rates(139 / 4, 1.0, 20_000), FAST, 12_500)
    assert "drawn 0.041 times on average" in slow.verdict  # 512 of 12,500
    assert "on average" not in planned(apex(), Rates(139 / 4, 1 / 19, 20_000), FAST, 12_500).verdict


def test_a_ratio_of_draws_asks_for_updates():
    plan = planned(replay(), Rates(100, 0.001, 10_000), FAST, 1000)
    assert plan.draws_per_s == pytest.approx(8000) and plan.updates_needed == pytest.approx(250)
    assert (plan.shards, plan.shard_nodes) == (1, 0)


def test_shards_by_draws_and_by_memory():
    by_draws = planned(replay(), Rates(100, 0.001, 3000), FAST, 1000)
    assert by_draws.shards == 3 and by_draws.shard_draws_per_s == pytest.approx(8000 / 3)
    assert "--algo.replay.shards 3" in by_draws.verdict
    nodes = dataclasses.replace(FAST, memory_gib=100)
    large = planned(replay(memory_bytes=300 * 2**30), Rates(100, 0.001, 1e6), nodes, 1000)
    assert (large.shards, large.shard_nodes, large.nodes) == (4, 4, large.actor_nodes + 5)
    assert large.shard_gib == pytest.approx(75)
    assert large.learner_in == pytest.approx(8000 * 10_000)  # drawn items come over the network, as a whole
    assert planned(replay(), Rates(100, 0.001, 1e6), FAST, 1000, least_shards=2).shards == 2


def test_aggregators_by_unrolls():
    assert planned(queue(), Rates(100, 0.001, unrolls_per_s=100), FAST, 10_000).aggregators == 0
    plan = planned(queue(), Rates(100, 0.001, unrolls_per_s=99), FAST, 10_000)
    assert plan.aggregators == 2 and "--ray.aggregators 2" in plan.verdict


@pytest.mark.parametrize(
    "work, nodes, name",
    [
        (queue(bytes=100_000_000), FAST, "the network into the learner's node"),
        (queue(floats=1_000_000_000), dataclasses.replace(FAST, memory_gib=1e5), "the network out of the learner's"),
        (queue(ahead=4), dataclasses.replace(FAST, memory_gib=0.5), "the memory of the learner's node"),
    ],
)
def test_what_limits_is_named(work, nodes, name):
    plan = planned(work, Rates(100, 0.001), nodes, 20_000)
    assert plan.limits[0].name.startswith(name) and plan.limits[0].share > 1
    assert "does not fit" in plan.verdict and name in plan.verdict


@pytest.mark.parametrize(
    "rates, nodes, target, message",
    [
        (Rates(100, 0.1), Nodes(), 0.0, "--steps-per-s is 0"),
        (Rates(100, 0.1), Nodes(), math.inf, "--steps-per-s is inf"),
        (Rates(100, 0.1), Nodes(), math.nan, "--steps-per-s is nan"),
        (Rates(-1, 0.1), Nodes(), 1.0, "--actor-steps-per-s is -1"),
        (Rates(100, 0.0), Nodes(), 1.0, "--learner-s is 0"),
        (Rates(100, 0.1, 0.0), Nodes(), 1.0, "--draws-per-s is 0"),
        (Rates(100, 0.1), Nodes(cores=1, cpus_per_actor=2), 1.0, "--cores-per-node is 1, and an actor takes 2 CPUs"),
        (Rates(100, 1e-9), Nodes(), 1e8, "--steps-per-s 1e\\+08 needs 62,500 nodes of 16 cores"),
    ],
)
def test_what_cannot_be_is_refused(rates, nodes, target, message):
    with pytest.raises(UsageError, match=message):
        planned(queue(), rates, nodes, target)


@pytest.mark.parametrize("recipe", ["ppo", "impala", "apex_dqn", "gorila"])
def test_every_kind_of_recipe_can_be_measured(recipe):
    config = rookery.configure(recipe, "CartPole-v1")
    found = measure(config, 0.05)
    assert found.actor_steps_per_s > 0 and found.learner_s > 0
    assert (found.draws_per_s > 0) == (recipe == "apex_dqn")
    assert spec_of(config).obs == CARTPOLE.obs
