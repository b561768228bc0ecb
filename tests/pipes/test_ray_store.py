"""Ray as a transport: calls as a channel, weights by version, heartbeats, and arrays in the object store."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from support_ray import cluster_of, until

from rookery.core.errors import EnvError, UsageError
from rookery.pipes import ray_store
from rookery.pipes.channel import ChannelClosed, Listener
from rookery.pipes.ray_store import LIFE, WATCH, WORK, RayChannel, RayPulse, RayStore, RemoteBuffers, check_store

SHAPES = {"obs": ((3, 2), "float32"), "live": ((3, 2), "bool")}


class Calls:
    """A Ray actor of which the test decides when each call ends."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, tuple[Any, ...], Future]] = []  # method, group of threads, arguments, answer

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def answers(self, name: str) -> list[Future]:
        return [answer for method, _, _, answer in self.made if method == name]


class Method:
    def __init__(self, calls: Calls, name: str, group: str = ""):
        self._calls, self._name, self._group = calls, name, group

    def options(self, concurrency_group: str) -> Method:
        return Method(self._calls, self._name, concurrency_group)

    def remote(self, *args: Any) -> Method:
        self._answer: Future = Future()
        self._calls.made.append((self._name, self._group, args, self._answer))
        return self

    def future(self) -> Future:
        return self._answer


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def channel(calls, monkeypatch) -> Iterator[RayChannel]:
    import ray

    monkeypatch.setattr(ray, "kill", lambda actor: None)
    channel = RayChannel(calls)
    yield channel
    channel.close()


# The channel


def test_answers_are_heard_in_the_order_of_the_calls(calls, channel):
    for number in range(3):
        channel.send({"op": "fill", "number": number}, 0.0)
    first, second, third = calls.answers("hear")
    third.set_result([{"op": "full", "number": 2}])
    second.set_result([{"op": "cut", "number": 1}, {"op": "full", "number": 1}])
    assert not channel.poll()
    first.set_result([{"op": "full", "number": 0}])
    assert channel.poll()
    heard = [channel.recv(0.0) for _ in range(4)]
    assert [(m["op"], m["number"]) for m in heard] == [("full", 0), ("cut", 1), ("full", 1), ("full", 2)]
    assert not channel.poll()


def test_orders_heartbeats_and_the_call_that_never_ends_have_threads_of_their_own(calls, channel):
    channel.send({"op": "fill"}, 0.0)
    channel.ask_beat()
    channel.ask_cut(5)
    channel.ask_stacks()
    groups = {name: group for name, group, _, _ in calls.made}
    assert groups == {
        "about": WATCH, "life": LIFE, "hear": WORK, "beat": WATCH, "cut": WATCH, "stacks": WATCH,
    }  # fmt: skip


def test_an_answer_wakes_whoever_waits_for_several_channels(calls, channel):
    listener = Listener()
    listener.add(channel)
    channel.send({"op": "fill"}, 0.0)
    assert listener.wait(0.0) == []
    threading.Thread(target=calls.answers("hear")[0].set_result, args=([{"op": "full"}],)).start()
    assert listener.wait(30.0) == [channel]
    assert channel.poll() and channel.recv(0.0) == {"op": "full"} and not channel.poll()
    assert listener.wait(0.0) == []
    listener.close()


def test_what_was_said_before_the_end_is_heard_and_then_why_it_has_ended(calls, channel):
    channel.send({"op": "fill"}, 0.0)
    calls.answers("hear")[0].set_result([{"op": "full"}])
    calls.answers("life")[0].set_exception(RuntimeError("The actor is dead because its worker process has died."))
    assert channel.poll() and channel.recv(0.0) == {"op": "full"}
    assert channel.poll() and channel.ended
    with pytest.raises(ChannelClosed, match=r"actor is dead because its worker process has died"):
        channel.recv(0.0)
    with pytest.raises(ChannelClosed, match="is dead because"):
        channel.send({"op": "fill"}, 0.0)


def test_a_call_that_fails_is_the_end(calls, channel):
    channel.send({"op": "fill"}, 0.0)
    calls.answers("hear")[0].set_exception(RuntimeError("object lost\nsecond line\nthird\nfourth"))
    assert channel.poll() and channel.why == "object lost second line third"


def test_a_node_that_cannot_say_what_it_has_is_the_end(calls, channel):
    calls.answers("about")[0].set_exception(RuntimeError("No package metadata was found for torch"))
    assert channel.poll() and channel.ended and "metadata" in channel.why and channel.where == {}


def test_calls_that_end_after_the_channel_write_to_no_descriptor(calls, channel):
    """Its number may belong to another file by then."""
    channel.send({"op": "fill"}, 0.0)
    reader, before = channel.fileno(), channel._alarm._bell.writer
    channel.close()
    pipes = [os.pipe() for _ in range(4)]
    assert {reader, before} <= {fd for pipe in pipes for fd in pipe}, "the numbers are used again"
    for ends in pipes:
        os.set_blocking(ends[0], False)
    calls.answers("hear")[0].set_result([{"op": "full"}])
    calls.answers("life")[0].set_exception(RuntimeError("gone"))
    calls.answers("about")[0].set_result({"node": "here"})
    assert channel.poll() and channel.ended
    for read, write in pipes:
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
        os.close(read)
        os.close(write)


# Heartbeats


def test_a_heartbeat_is_asked_for_once_a_second_and_not_while_one_is_on_its_way(calls, channel, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(ray_store.time, "monotonic", lambda: now[0])
    channel.ask_beat()
    channel.ask_beat()
    assert len(calls.answers("beat")) == 1
    now[0] += 10.0
    channel.ask_beat()
    assert len(calls.answers("beat")) == 1, "a stuck actor is not asked again and again"
    calls.answers("beat")[0].set_result((7, 3, 12))
    assert (channel.beats, channel.filling, channel.rows) == (7, 3, 12)
    channel.ask_beat()
    assert len(calls.answers("beat")) == 2
    now[0] += 0.5
    calls.answers("beat")[1].set_result((8, 3, 13))
    channel.ask_beat()
    assert len(calls.answers("beat")) == 2


def test_a_sign_of_life_is_another_number_an_order_or_another_actor(calls, channel, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(ray_store.time, "monotonic", lambda: now[0])
    channels = {0: channel}
    pulse = RayPulse(channels)
    sign = pulse.last(0)
    now[0] += 3.0
    assert pulse.last(0) == sign and pulse.age(0) == 3.0
    calls.answers("beat")[0].set_result((1, 0, 1))
    assert pulse.last(0) != sign and pulse.age(0) == 0.0
    sign, now[0] = pulse.last(0), now[0] + 2.0
    pulse.beat(0)
    assert pulse.last(0) != sign and pulse.age(0) == 0.0
    sign = pulse.last(0)
    channels[0] = RayChannel(Calls())
    assert pulse.last(0) != sign
    channels[0].close()


def test_an_unroll_is_cut_once(calls, channel):
    pulse = RayPulse({0: channel})
    for sequence in (4, 4, 5):
        pulse.cut(0, sequence)
    assert [args for name, _, args, _ in calls.made if name == "cut"] == [(4,), (5,)]
    buffers = RemoteBuffers()
    buffers.cut(4)
    assert buffers.is_cut(4) and not buffers.is_cut(5)


# What crew and actors share


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of(1) as cluster:
        yield cluster


def store_of(*channels: RayChannel) -> RayStore:
    store = RayStore()
    store._shapes = {path: (shape, dtype) for path, (shape, dtype) in SHAPES.items()}
    store.channels.update(enumerate(channels))
    return store


def test_weights_are_put_once_per_version_and_sent_to_each_actor_once(cluster, monkeypatch):
    import ray

    puts, put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or put(value))
    store = store_of()
    vector = torch.arange(5.0)
    store.publish(vector, 3)
    orders = [store.order(actor, slot) for slot, actor in enumerate((0, 1, 0))]
    assert [order["version"] for order in orders] == [3, 3, 3] and len(puts) == 1
    assert ["weights" in order for order in orders] == [True, True, False]
    assert ray.get(orders[1]["weights"]).tolist() == vector.tolist()
    vector += 1
    store.publish(vector, 4)
    assert ray.get(orders[1]["weights"]).tolist() == [0, 1, 2, 3, 4], "what was published does not change"
    assert ray.get(store.order(0, 2)["weights"]).tolist() == vector.tolist() and len(puts) == 2
    assert "weights" not in store.order(0, 2)
    store.describe(0)  # another actor comes up in its place
    assert "weights" in store.order(0, 2)


def test_an_actor_keeps_its_weights_until_newer_ones_come():
    buffers, vector = RemoteBuffers(), torch.zeros(3)
    buffers.offer(np.arange(3, dtype=np.float32), {"version": 7})
    assert buffers.pull(vector, {}) == 7 and vector.tolist() == [0, 1, 2]
    buffers.offer(None, {"version": 7})
    assert buffers.pull(vector, {}) == 7 and vector.tolist() == [0, 1, 2]
    buffers.offer(np.ones(3, np.float32), {"version": 8})
    buffers.offer(np.full(3, 9, np.float32), {"version": 9})
    assert buffers.pull(vector, {}) == 9 and vector.tolist() == [9, 9, 9]


def filled(store: RayStore, slot: int, incarnation: int, sequence: int) -> dict[str, Any]:
    buffers = RemoteBuffers()
    buffers.open(0, store.describe(0))
    arrays = buffers.begin(slot, incarnation, sequence, 1)
    arrays["obs"][:] = sequence
    buffers.progress(slot, 2)
    assert (buffers.slot, buffers.row) == (slot, 2)
    message = {"op": "full", "slot": slot} | buffers.finish(slot)
    assert (buffers.slot, buffers.row) == (-1, 0)
    return message


def test_arrays_are_taken_if_they_are_of_the_order_that_is_due(channel):
    store = store_of(channel)
    arrays = store.take(2, 0, 1, 5, filled(store, 2, 1, 5))
    assert {path: (array.shape, str(array.dtype)) for path, array in arrays.items()} == SHAPES
    assert (arrays["obs"] == 5).all() and store.bytes_in == 3 * 2 * 4 + 3 * 2


@pytest.mark.parametrize("wrong", [(3, 1, 5), (2, 0, 5), (2, 1, 4)])
def test_arrays_of_another_slot_incarnation_or_sequence_are_refused(channel, wrong):
    store = store_of(channel)
    with pytest.raises(EnvError, match=rf"actor 0 delivered \({wrong[0]}, {wrong[1]}, {wrong[2]}\) instead") as caught:
        store.take(2, 0, 1, 5, filled(store, *wrong))
    assert caught.value.reason == "torn_slot" and store.bytes_in == 0


def test_rows_of_an_unroll_that_was_delivered_are_not_counted_as_lost_with_the_next(calls, channel):
    store = store_of(channel)
    store.publish = lambda vector, version: None
    store._version, store._told[0] = 1, 1
    store.order(0, 2)
    channel.ask_beat()
    calls.answers("beat")[0].set_result((9, 2, 2))
    assert store.rows(2) == 2 and store.steps(2, lanes=4) == 8
    store.take(2, 0, 0, 0, filled(store, 2, 0, 0))
    store.release(2, poison=False)
    store.order(0, 2)
    assert store.rows(2) == 0 and store.free == [2]


def test_arrays_that_arrive_are_views_of_the_store_and_cannot_be_written(cluster):
    import ray

    @ray.remote(num_cpus=0)
    class Maker:
        def make(self, rows: int) -> list[dict[str, Any]]:
            return [{"arrays": {"obs": np.ones((rows, 4), np.float32)}}]

    maker = Maker.remote()
    for rows in (10, 100_000):  # with the message, and through the store
        (message,) = maker.make.remote(rows).future().result(60)
        array = message["arrays"]["obs"]
        assert array.shape == (rows, 4) and not array.flags.owndata and not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array += 1
    ray.kill(maker)


def test_by_reference_only_what_a_table_decides_by_is_delivered(cluster):
    import ray

    store = RayStore()
    store.by_reference = True
    store._shapes = dict(SHAPES)
    message = filled(store, 0, 0, 4)
    assert message["arrays"].keys() == {"live"} and message["bytes"] == 30
    whole = ray.get(message["reference"])
    assert whole.keys() == SHAPES.keys() and (whole["obs"] == 4).all()


def test_a_store_with_too_little_room_says_what_is_needed_and_what_there_is(cluster):
    import ray

    have = int(ray.nodes()[0]["Resources"]["object_store_memory"])
    check_store(have // 2, have - have // 2)
    with pytest.raises(UsageError, match=r"need 201.0 MiB \(200.0 MiB of unrolls, .*ray.store_gib") as caught:
        check_store(200 * 2**20, 2**20)
    assert f"have {have / 2**20:.1f} MiB" in str(caught.value)


def test_ray_knows_when_an_actor_is_killed_and_says_so_to_the_channel(cluster):
    from rookery.crews.ray import Host, remote_actor
    from rookery.pipes.ray_store import GROUPS

    channel = RayChannel(remote_actor(Host, 0.5, "SPREAD", GROUPS))
    until(lambda: channel.where, "the actor")
    os.kill(channel.where["pid"], 9)
    until(lambda: channel.poll(), "the end", 5.0)
    assert channel.ended and "actor is dead" in channel.why
    channel.close()
