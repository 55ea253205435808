"""What tokens cost later that a prefill worker has missed, as a table's policy weighs it.

Local turns leave their tokens to the prefill worker. The next remote turn of the conversation
computes them, if there is one. If there is one anyway, they are no reason to avoid it now.
"""

from __future__ import annotations

from ppd.decision import Route

_FIRST_SHARE = 0.2  # of remote turns, before any was served
_TURNS = 50.0  # that the means reach back


class CatchUp:
    """What was usual in recent later turns, from which follows what a missed token costs later."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}
        self._longer_ms: float | None = None

    def share(self, cell: int) -> float:
        """The share of remote turns in a cell of the table."""
        return self._shares.get(cell, _FIRST_SHARE)

    def note(self, cell: int, route: Route, longer_ms: float | None) -> None:
        """Record a served turn.

        Args:
            cell: of the table.
            route: that it took.
            longer_ms: what a local turn takes longer than a remote one, where nothing waits and
                nothing was missed: below 0 if it is shorter. None if it could not have been local.
        """
        before = self.share(cell)
        self._shares[cell] = before + ((route is Route.REMOTE) - before) / _TURNS
        if longer_ms is not None:
            usual_ms = longer_ms if self._longer_ms is None else self._longer_ms
            self._longer_ms = usual_ms + (longer_ms - usual_ms) / _TURNS

    def later_ms(self, cell: int, turn: int, left_ms: float, longer_ms: float) -> float:
        """What later turns take longer, in all, if this one is local.

        Either a later one is remote and computes what is missed, or all later ones are local:
        whichever costs less. A conversation of n turns has a further one with probability
        n / (n + 1), by Laplace's rule of succession. Where that probability stays, n more follow in
        the mean.

        Args:
            cell: of the table.
            turn: the turn's number in its conversation, from 1.
            left_ms: time to compute what is missed after a local turn.
            longer_ms: as of ``note``, of this turn.
        """
        share, goes_on = self.share(cell), turn / (turn + 1)
        another_remote = goes_on * share / (1.0 - goes_on * (1.0 - share))
        usual_ms = longer_ms if self._longer_ms is None else self._longer_ms
        return min(another_remote * left_ms, turn * max(0.0, usual_ms, longer_ms))

    def reset(self) -> None:
        """Discard what was usual."""
        self._shares.clear()
        self._longer_ms = None
