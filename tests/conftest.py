"""One torch thread for the tests: arrays are small here, and waiting threads are slow on a busy machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
