"""Publishes vectors of equal numbers without a pause until the reader has had enough."""

import sys

import numpy as np

from rookery.pipes.shm import Pulse, Segment, WeightBoard

if __name__ == "__main__":
    weights, beats, floats, least = (int(word) for word in sys.argv[1:])
    board = WeightBoard(Segment.attach(weights, WeightBoard.size(floats)))
    pulse = Pulse(Segment.attach(beats, Pulse.size(1)))
    vector = np.empty(floats, np.float32)
    version = 0
    while version < least or pulse.last(0)[1] == 0:
        vector.fill(version)
        board.publish(vector, version)
        version += 1
