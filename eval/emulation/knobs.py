"""The file that emulated workers and the process that controls them share.

It holds the slow motion, the link's bandwidth and latency, and the link's slots. All processes map
it into memory, so that a change takes effect with the next step or transfer. A slot is one end of
the link: a worker sends one transfer at a time and receives one at a time. Times are those of
``time.monotonic``, which all processes of a machine share.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ppd.errors import ConfigError

_HEAD = struct.Struct("<8sddd")  # magic, slow motion, gigabits a second, latency in ms
_SLOT = struct.Struct("<Qdq")  # key, free at (s), bytes ever
_MAGIC = b"ppd-emu1"
_SLOTS = 256
_SIZE = _HEAD.size + _SLOTS * _SLOT.size


@dataclass(frozen=True, slots=True)
class Knobs:
    """What can be changed while workers run.

    Attributes:
        slow_motion: by what all device times are multiplied.
        link_gbps: gigabits a second, in each direction of a worker.
        link_latency_ms: added to each transfer.
    """

    slow_motion: float = 1.0
    link_gbps: float = 100.0
    link_latency_ms: float = 0.0

    def __post_init__(self) -> None:
        if not (1.0 <= self.slow_motion <= 10_000 and math.isfinite(self.slow_motion)):
            raise ConfigError(f"slow motion must be 1 to 10,000, got {self.slow_motion:g}")
        if not (0.001 <= self.link_gbps <= 100_000 and 0 <= self.link_latency_ms <= 10_000):
            raise ConfigError(
                f"the link must have 0.001 to 100,000 Gb/s and 0 to 10,000 ms, got "
                f"{self.link_gbps:g} Gb/s and {self.link_latency_ms:g} ms"
            )


class SharedKnobs:
    """The shared file, mapped."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("r+b")
        except OSError as error:
            raise ConfigError(f"{path}: no file of an emulation: {error}") from error
        if self._file.read(len(_MAGIC)) != _MAGIC or path.stat().st_size != _SIZE:
            self._file.close()
            raise ConfigError(f"{path}: no file of this version of the emulation")
        self._map = mmap.mmap(self._file.fileno(), _SIZE)
        self._lock = threading.Lock()  # flock does not exclude threads of one process

    @classmethod
    def create(cls, path: Path, knobs: Knobs) -> SharedKnobs:
        """Make the file, with all slots free."""
        path.write_bytes(_HEAD.pack(_MAGIC, 1.0, 1.0, 0.0) + bytes(_SIZE - _HEAD.size))
        shared = cls(path)
        shared.set(knobs)
        return shared

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
        self._file.close()

    def get(self) -> Knobs:
        """Return the knobs as they stand."""
        _, slow_motion, gbps, latency_ms = _HEAD.unpack_from(self._map)
        return Knobs(slow_motion, gbps, latency_ms)

    @property
    def slow_motion(self) -> float:
        """The slow motion as it stands."""
        return float(_HEAD.unpack_from(self._map)[1])

    def set(self, knobs: Knobs) -> None:
        """Change the knobs, for all processes."""
        with self._exclusive():
            _HEAD.pack_into(
                self._map,
                *(0, _MAGIC, knobs.slow_motion, knobs.link_gbps, knobs.link_latency_ms),
            )

    def reserve(
        self, sender: str, receiver: str, kv_bytes: int, now_s: float
    ) -> tuple[float, float]:
        """Take both ends of the link for a transfer, behind the transfers that have them.

        Returns:
            When it begins and when it ends, in seconds of ``time.monotonic``.

        Raises:
            ConfigError: there are more ends than slots.
        """
        with self._exclusive():
            knobs = self.get()
            keys = [_key(f"tx {sender}"), _key(f"rx {receiver}")]
            slots = [self._find(key) for key in keys]
            start_s = max(now_s, *(_SLOT.unpack_from(self._map, slot)[1] for slot in slots))
            ms = knobs.link_latency_ms + kv_bytes * 8 / (knobs.link_gbps * 1e6)
            end_s = start_s + ms * knobs.slow_motion / 1e3
            for key, slot in zip(keys, slots, strict=True):
                moved = _SLOT.unpack_from(self._map, slot)[2] + kv_bytes
                _SLOT.pack_into(self._map, slot, key, end_s, moved)
            return start_s, end_s

    def sent_bytes(self, sender: str) -> int:
        """Return the bytes of KV that a worker has ever sent."""
        with self._exclusive():
            return int(_SLOT.unpack_from(self._map, self._find(_key(f"tx {sender}")))[2])

    def _find(self, key: int) -> int:
        """Return the offset of a key's slot, which is taken now if it is new."""
        for offset in range(_HEAD.size, _SIZE, _SLOT.size):
            found = _SLOT.unpack_from(self._map, offset)[0]
            if not found:
                _SLOT.pack_into(self._map, offset, key, 0.0, 0)
            if found in (0, key):
                return offset
        raise ConfigError(f"the link of an emulation has {_SLOTS} ends at most")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def _key(name: str) -> int:
    """Return a number above 0 for a name; 0 marks a slot that is free."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") or 1
