"""Figures of the PPD paper, simulated."""

from __future__ import annotations

from itertools import takewhile

import pytest

from eval.simulation import paper_figures
from eval.simulation.cost_model import paper_model
from eval.simulation.paper_figures import FigureRow, figures


@pytest.fixture(scope="module")
def rows() -> list[FigureRow]:
    wanted = takewhile(lambda row: row.figure != "10", figures(seed=0))
    return [row for row in wanted if row.figure != "1"]


def test_a_slower_link_delays_remote_turns_alone(rows: list[FigureRow]) -> None:
    links = [row for row in rows if row.figure == "5"]
    remote = [row.t2_ttft_ms for row in links if row.configuration == "1P_3D"]
    local = [row.t2_ttft_ms for row in links if row.configuration == "1P_3pD"]
    assert remote == sorted(remote)
    assert remote[-1] > 1.1 * remote[0]
    assert max(local) == pytest.approx(min(local), rel=1e-3)
    assert max(local) < 0.5 * remote[0]


def test_nvlink_is_the_fitted_link() -> None:
    costs = paper_model()
    same = paper_figures._with_link(costs, 150e9)
    slower = paper_figures._with_link(costs, 10e9)
    assert same.transfer_ms == pytest.approx(costs.transfer_ms)
    more = costs.model.kv_bytes_per_token * 1e3 * (1 / 10e9 - 1 / 150e9)
    assert slower.transfer_ms - costs.transfer_ms == pytest.approx(more)


def test_more_local_turns_trade_tpot_for_ttft(rows: list[FigureRow]) -> None:
    for qps in (8.0, 16.0):
        here = [row for row in rows if row.figure == "6" and row.qps == qps]
        assert [row.axis for row in here] == list(paper_figures.SHARES)
        ttft, tpot = [row.t2_ttft_ms for row in here], [row.t2_tpot_ms for row in here]
        assert ttft == sorted(ttft, reverse=True)
        assert tpot == sorted(tpot)
