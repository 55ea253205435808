"""Tokens that all routers have sent to workers, and that are not answered.

Each router publishes its own tokens by worker, and reads those of the others a little later. So
routers that admit turns at the same time do not see each other's. A router therefore counts what
the others may not have seen of its own once for each of them, as if they had admitted as much.

With ``n`` routers, a budget ``b`` and no turn above ``t``, all of them together never exceed
``(2 - 1/n) * b + (n - 1) * (1 - 1/n) * t``. Without sharing it is ``n * b``. The proof: a router
admits if its own tokens, those read of others, and ``n - 1`` times what others have not read, are
at most ``b`` with the new turn. So what others have not read of it is at most ``b/n`` before its
last turn, and each of the ``n - 1`` others exceeds what was read of it by that and one turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from ppd.backlog import Backlog
from ppd.shared_records import LoadRecord

EntryId = tuple[int, int]  # its order in the stream
_MAX_WRITTEN = 64


def entry_id(name: str) -> EntryId:
    """Return the id of an entry from its name in the store, as ``1700000000000-0``."""
    at_ms, _, number = name.partition("-")
    return int(at_ms), int(number)


class _Snapshot:
    """What this router has published at one time.

    Attributes:
        tokens: by worker; at most what the others have read if they have read it.
        written_at_s: when the store has taken it; None before.
    """

    __slots__ = ("tokens", "written_at_s")

    def __init__(self, tokens: dict[str, int]) -> None:
        self.tokens = tokens
        self.written_at_s: float | None = None


class _Router:
    """What another router has published last."""

    __slots__ = ("read_at_s", "tokens")

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.read_at_s = 0.0


class SharedLoad:
    """The tokens of this router and of the others.

    Args:
        visible_s: time after which all others have read what the store has taken.
        silent_s: a router that has published nothing for so long has ended.
    """

    def __init__(self, visible_s: float, silent_s: float) -> None:
        self._own: list[Backlog] = []  # of models, which have no worker in common
        self._visible_s = visible_s
        self._silent_s = silent_s
        # Since the last one that all others have read: they may have read any of these.
        self._snapshots = [_Snapshot({})]
        self._snapshots[0].written_at_s = -visible_s
        self._published: dict[str, int] = {}
        self._routers: dict[bytes, _Router] = {}
        self._written: list[tuple[EntryId, float]] = []  # own entries that were not read back

    def follow(self, own: Backlog) -> None:
        """Count the tokens of a model that this router serves."""
        self._own.append(own)

    # -- of this router -----------------------------------------------------------------

    def publish(self) -> tuple[LoadRecord, ...]:
        """Return the tokens of this router, to be published now."""
        tokens, last = self._all(), self._snapshots[-1]
        self._published = tokens
        if last.written_at_s is None:  # the others may have read it all the same
            last.tokens = {
                worker: min(count, tokens[worker])
                for worker, count in last.tokens.items()
                if worker in tokens
            }
        else:
            self._snapshots.append(_Snapshot(tokens))
        return tuple(LoadRecord(worker, count) for worker, count in tokens.items())

    @property
    def changed(self) -> bool:
        """Whether the tokens of this router are others than those that were published last."""
        return self._all() != self._published

    def written(self, entry: EntryId, now_s: float) -> None:
        """Record that the store has taken what was published last."""
        self._snapshots[-1].written_at_s = now_s
        if len(self._written) < _MAX_WRITTEN:  # the first one is what counts
            self._written.append((entry, now_s))

    @property
    def kept(self) -> int:
        """The number of published states that others may not have read."""
        return len(self._snapshots)

    # -- of the others -------------------------------------------------------------------

    def read(self, origin: bytes, loads: Iterable[LoadRecord], now_s: float) -> None:
        """Record what another router has published."""
        router = self._routers.setdefault(origin, _Router())
        router.tokens = {load.worker: load.tokens for load in loads}
        router.read_at_s = now_s

    def read_until(self, entry: EntryId | None, now_s: float) -> None:
        """Record that all entries up to one have been read.

        Args:
            entry: None if there was none.
            now_s: when the store answered.
        """
        if entry is not None:
            self._written = [written for written in self._written if written[0] > entry]
        # The time that counts is that of the last read: without the store nobody can be heard.
        ended_s = now_s - self._silent_s
        self._routers = {
            origin: router for origin, router in self._routers.items() if router.read_at_s > ended_s
        }
        self._forget_read(now_s)

    @property
    def routers(self) -> int:
        """The number of routers, this one included."""
        return 1 + len(self._routers)

    def is_stale(self, now_s: float) -> bool:
        """Whether entries are not read in time; an own entry that is not read back shows it."""
        return bool(self._written) and self._written[0][1] + self._visible_s < now_s

    def of(self, worker: str) -> int:
        """Tokens that all routers have sent to a worker, as far as they have been read."""
        return self._of_own(worker) + self._of_others(worker)

    def claimed(self, worker: str, now_s: float) -> int:
        """Tokens that count against a worker's budget before this router admits another turn."""
        own = self._of_own(worker)
        if not self._routers:
            return own
        self._forget_read(now_s)
        unread = own - min(snapshot.tokens.get(worker, 0) for snapshot in self._snapshots)
        claimed = own + self._of_others(worker) + (self.routers - 1) * max(0, unread)
        if self.is_stale(now_s):  # its share of the budget is what is left to it
            return max(claimed, self.routers * own)
        return claimed

    def _all(self) -> dict[str, int]:
        tokens: dict[str, int] = {}
        for own in self._own:
            tokens |= own.all()
        return tokens

    def _of_own(self, worker: str) -> int:
        return sum(own.of(worker) for own in self._own)

    def _of_others(self, worker: str) -> int:
        return sum(router.tokens.get(worker, 0) for router in self._routers.values())

    def _forget_read(self, now_s: float) -> None:
        """Drop the snapshots before the last one that all others have read."""
        read_s = now_s - self._visible_s
        for position in range(len(self._snapshots) - 1, 0, -1):
            written_at_s = self._snapshots[position].written_at_s
            if written_at_s is not None and written_at_s <= read_s:
                del self._snapshots[:position]
                return
