import os
import select
import socket
import struct
import threading

import msgspec
import pytest

from rookery.pipes.channel import Channel, ChannelClosed, ChannelTimeout, Listener, pair, wait


@pytest.fixture
def ends():
    ours, fd = pair()
    theirs = Channel.from_fd(fd)
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def raw():
    """A channel, and the bare socket of a peer that may say anything."""
    ours, fd = pair(limit=1000)
    theirs = socket.socket(fileno=fd)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order_both_ways(ends):
    a, b = ends
    sent = [{"op": "slot", "n": i, "data": bytes([i]) * i, "list": [1.5, None, True, {"x": "é"}]} for i in range(50)]
    for message in sent:
        a.send(message, 1)
        b.send(message, 1)
    assert [b.recv(1) for _ in sent] == sent
    assert [a.recv(1) for _ in sent] == sent


def test_a_message_larger_than_the_socket_passes_while_the_peer_reads(ends):
    a, b = ends
    message = {"data": os.urandom(5_000_000)}
    thread = threading.Thread(target=a.send, args=(message, 60))
    thread.start()
    assert b.recv(60) == message
    thread.join(60)


def test_two_peers_who_both_send_first_do_not_wait_for_each_other(ends):
    message, heard = {"data": bytes(3_000_000)}, []

    def talk(end):
        end.send(message, 60)
        heard.append(end.recv(60))

    threads = [threading.Thread(target=talk, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert heard == [message, message]


def test_silence_is_a_timeout_and_the_channel_goes_on(ends):
    a, b = ends
    with pytest.raises(ChannelTimeout):
        b.recv(0.0)
    with pytest.raises(ChannelTimeout):
        b.recv(0.01)
    a.send({"n": 1}, 1)
    assert b.recv(1) == {"n": 1}


def test_a_timeout_in_the_middle_of_a_message_loses_nothing(raw):
    ours, theirs = raw
    body = msgspec.msgpack.encode({"n": 1})
    frame = struct.pack("<I", len(body)) + body
    for cut in range(1, len(frame)):
        theirs.sendall(frame[:cut])
        assert not ours.poll()
        with pytest.raises(ChannelTimeout):
            ours.recv(0.0)
        theirs.sendall(frame[cut:])
        assert ours.poll()
        assert ours.recv(0.0) == {"n": 1}


def test_a_peer_that_does_not_listen_is_a_timeout_and_the_torn_message_ends_sending(ends):
    a, b = ends
    with pytest.raises(ChannelTimeout, match="bytes"):
        a.send({"data": bytes(10_000_000)}, 0.05)
    with pytest.raises(ChannelClosed):  # the peer would take what follows for the rest of the torn message
        a.send({"n": 1}, 1)
    b.send({"n": 2}, 1)
    assert a.recv(1) == {"n": 2}


def test_a_full_socket_that_took_nothing_is_only_a_timeout(ends):
    a, b = ends
    sent = 0
    while True:
        try:
            a.send({"n": sent}, 0.0)
            sent += 1
        except ChannelTimeout as error:
            whole = "took 0 of" in str(error)
            break
    if whole:  # else the kernel had room for a part, which is the case above
        assert [b.recv(1)["n"] for _ in range(sent)] == list(range(sent))
        a.send({"n": sent}, 1)
        assert b.recv(1) == {"n": sent}


def test_what_was_said_before_the_end_is_delivered_then_the_end(ends):
    a, b = ends
    a.send({"n": 1}, 1)
    a.send({"n": 2}, 1)
    a.close()
    assert b.recv(1) == {"n": 1}
    assert b.poll() and b.recv(1) == {"n": 2}
    assert b.poll()  # the news that there is no more
    with pytest.raises(ChannelClosed):
        b.recv(3600)
    assert b.ended


def test_a_peer_that_left_with_our_words_unread_still_delivers_its_own(ends):
    a, b = ends
    b.send({"unread": True}, 1)
    a.send({"n": 1}, 1)
    a.close()  # the kernel answers with ECONNRESET
    assert b.recv(1) == {"n": 1}
    with pytest.raises(ChannelClosed):
        b.recv(3600)
    with pytest.raises(ChannelClosed):
        b.send({"n": 2}, 1)


def test_a_message_cut_by_the_peers_death_is_never_delivered(raw):
    ours, theirs = raw
    theirs.sendall(struct.pack("<I", 100) + b"half")
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.recv(3600)


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 8, struct.pack("<I", 3) + b"\xc1\xc1\xc1", struct.pack("<I", 1) + b"\x01"]
)
def test_nonsense_ends_the_channel(raw, garbage):
    ours, theirs = raw
    theirs.sendall(garbage)
    with pytest.raises(ChannelClosed, match="peer"):
        ours.recv(3600)
    with pytest.raises(ChannelClosed):
        ours.recv(3600)


def test_a_message_over_the_limit_is_refused_on_our_side_and_harms_nothing(raw):
    ours, theirs = raw
    with pytest.raises(ValueError, match="limit is 1000"):
        ours.send({"data": bytes(1001)}, 1)
    with pytest.raises(TypeError):
        ours.send({"data": object()}, 1)
    ours.send({"n": 1}, 1)
    assert theirs.recv(100)[4:] == msgspec.msgpack.encode({"n": 1})


def test_a_closed_channel_says_so(ends):
    a, _ = ends
    a.close()
    a.close()
    for attempt in (lambda: a.send({}, 1), lambda: a.recv(3600)):
        with pytest.raises(ChannelClosed):
            attempt()


def test_wait_returns_exactly_those_who_have_something_to_say():
    pairs = [pair() for _ in range(4)]
    ours = [channel for channel, _ in pairs]
    theirs = [Channel.from_fd(fd) for _, fd in pairs]
    assert wait(ours, 0.0) == []
    theirs[1].send({"n": 1}, 1)
    theirs[2].send({"n": 2}, 1)
    theirs[2].send({"n": 3}, 1)
    theirs[3].close()
    assert wait(ours, 3600) == ours[1:]
    assert ours[2].recv(0) == {"n": 2}
    assert wait(ours[:3], 3600) == ours[1:3]  # the second message already lies in the channel's own buffer
    assert wait([], 0.0) == []


def test_half_a_message_is_not_ready(raw):
    ours, theirs = raw
    theirs.sendall(b"\x10")
    assert wait([ours], 0.02) == []


def test_wait_comes_back_when_it_is_woken(ends):
    read, write = os.pipe()
    os.write(write, b"x")
    assert wait(list(ends), 3600, wake=read) == []
    ends[0].send({"n": 1}, 1)
    assert wait(list(ends), 3600, wake=read) == [ends[1]]
    os.close(read)
    os.close(write)


# Listeners


@pytest.fixture
def crowd():
    """A listener to four channels, and the peers."""
    pairs = [pair() for _ in range(4)]
    ours, theirs = [channel for channel, _ in pairs], [Channel.from_fd(fd) for _, fd in pairs]
    listener = Listener()
    for channel in ours:
        listener.add(channel)
    yield listener, ours, theirs
    listener.close()
    for channel in (*ours, *theirs):
        channel.close()


def heard(listener: Listener, ours: list[Channel], timeout: float) -> list[int]:
    return sorted(ours.index(channel) for channel in listener.wait(timeout))


def test_a_listener_hears_exactly_those_who_have_said_something(crowd):
    listener, ours, theirs = crowd
    assert heard(listener, ours, 0.0) == []
    theirs[1].send({"n": 1}, 1)
    theirs[2].send({"n": 2}, 1)
    assert heard(listener, ours, 3600) == [1, 2]
    assert heard(listener, ours, 3600) == [1, 2], "as long as it lies there"
    assert ours[1].recv(0) == {"n": 1}
    assert heard(listener, ours, 3600) == [2]
    assert ours[2].recv(0) == {"n": 2}
    assert heard(listener, ours, 0.0) == []


def test_a_listener_hears_the_end_of_a_peer_until_the_channel_is_removed(crowd):
    listener, ours, theirs = crowd
    theirs[3].send({"n": 1}, 1)
    theirs[3].close()
    for _ in range(2):
        assert heard(listener, ours, 3600) == [3]
        while ours[3].poll() and not ours[3].ended:
            assert ours[3].recv(0) == {"n": 1}
    assert heard(listener, ours, 3600) == [3], "the end stays"
    listener.remove(ours[3])
    assert heard(listener, ours, 0.0) == []


def test_a_removed_channel_is_not_heard_and_may_be_closed_and_its_number_used_again(crowd):
    listener, ours, theirs = crowd
    theirs[0].send({"n": 1}, 1)
    listener.remove(ours[0])
    listener.remove(ours[0])  # one that is not listened to is passed over
    assert heard(listener, ours, 0.0) == []
    number = ours[0].fileno()
    ours[0].close()
    ours[0], fd = pair()
    theirs[0].close()
    theirs[0] = Channel.from_fd(fd)
    assert ours[0].fileno() == number
    listener.add(ours[0])
    theirs[0].send({"n": 2}, 1)
    assert heard(listener, ours, 3600) == [0] and ours[0].recv(0) == {"n": 2}


def test_a_message_in_parts_is_reported_and_read_when_it_is_whole(raw):
    ours, theirs = raw
    listener = Listener()
    listener.add(ours)
    body = msgspec.msgpack.encode({"n": 1})
    frame = struct.pack("<I", len(body)) + body
    theirs.sendall(frame[:5])
    assert listener.wait(3600) == [ours] and not ours.poll()
    assert listener.wait(0.0) == [], "what was taken in is not reported again"
    theirs.sendall(frame[5:])
    assert listener.wait(3600) == [ours] and ours.recv(0) == {"n": 1}
    listener.close()


def test_a_listener_is_woken_and_tells_of_no_channel(ends):
    read, write = os.pipe()
    listener = Listener(wake=read)
    listener.add(ends[1])
    assert listener.wait(0.0) == []
    os.write(write, b"x")
    assert listener.wait(3600) == []
    ends[0].send({"n": 1}, 1)
    assert listener.wait(3600) == [ends[1]]
    listener.close()
    os.close(read)
    os.close(write)


def test_the_channel_is_not_inherited_and_can_be_selected(ends):
    a, b = ends
    assert not os.get_inheritable(a.fileno())
    b.send({"n": 1}, 1)
    assert select.select([a], [], [], 0)[0] == [a]
