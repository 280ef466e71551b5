"""The parts of the replay that are C++ (src/replay): the hash that gives Q, K and V, and the fp64 check."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

import raddle
from raddle import _library

_fill = _library.function("raddle.replay.fill")
_sinks = _library.function("raddle.replay.sinks")
_verify = _library.function("raddle.replay.verify")
