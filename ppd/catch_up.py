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
        self._held = 1.0  # share of turns whose prefix the prefill worker still held
        self._forced = 0.0  # of those, share of turns that had to be remote
        self._chosen: dict[int, float] = {}  # share of remote ones among the others, by cell
        self._longer_ms: float | None = None

    def share(self, cell: int) -> float:
        """The share of remote turns in a cell of the table, of those that could be local."""
        return self._chosen.get(cell, _FIRST_SHARE)

    def note(self, cell: int, route: Route, longer_ms: float | None, *, held: bool) -> None:
        """Record a served later turn.

        Args:
            cell: of the table.
            route: that it took.
            longer_ms: what a local turn takes longer than a remote one, where nothing waits and
                nothing was missed: below 0 if it is shorter. None if it could not have been local.
            held: whether the prefill worker had a part of its prompt cached.
        """
        self._held += (held - self._held) / _TURNS
        if held:
            self._forced += ((longer_ms is None) - self._forced) / _TURNS
        if longer_ms is None:
            return
        before = self.share(cell)
        self._chosen[cell] = before + ((route is Route.REMOTE) - before) / _TURNS
        usual_ms = longer_ms if self._longer_ms is None else self._longer_ms
        self._longer_ms = usual_ms + (longer_ms - usual_ms) / _TURNS

    def later_ms(self, cell: int, turn: int, left_ms: float, longer_ms: float) -> float:
        """What later turns take longer, in all, if this one is local.

        A later turn that has to be remote computes what is missed. If there is none, one that is
        remote by choice does, or all later ones are local: whichever costs less. A conversation of
        n turns has a further one with probability n / (n + 1), by Laplace's rule of succession.
        Where that probability stays, n more follow in the mean. If the prefill worker has evicted
        the prefix by then, it computes all of it anyway, and what is missed costs nothing.

        Args:
            cell: of the table.
            turn: the turn's number in its conversation, from 1.
            left_ms: time to compute what is missed after a local turn.
            longer_ms: as of ``note``, of this turn.
        """
        forced, chosen = _another(self._forced, turn), _another(self.share(cell), turn)
        left_ms *= self._held
        usual_ms = longer_ms if self._longer_ms is None else self._longer_ms
        by_choice_ms = min(chosen * left_ms, turn * max(0.0, usual_ms, longer_ms))
        return forced * left_ms + (1.0 - forced) * by_choice_ms

    def reset(self) -> None:
        """Discard what was usual."""
        self._held, self._forced = 1.0, 0.0
        self._chosen.clear()
        self._longer_ms = None


def _another(share: float, turn: int) -> float:
    """The probability that one of a share of turns follows the conversation's turn."""
    goes_on = turn / (turn + 1)
    return goes_on * share / (1.0 - goes_on * (1.0 - share))
