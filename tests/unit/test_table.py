"""The decision table: its file, what is refused, and the lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ppd.errors import TableError
from ppd.table import Costs, Table
from ppd.table_file import Bin, CellRecord, TableRecord

from .fixtures import AXES, table_record


def numbered(c: int, n: int, o: int, q: int) -> tuple[float, float, float, float]:
    return (100.0 + 10 * c + n + 0.1 * q, 5.0, 50.0 + 10 * c + n, 6.0)


RECORD = table_record(numbered)
TABLE = Table(RECORD)


def file_of(record: TableRecord) -> bytes:
    return msgspec.json.encode(record)


def test_a_file_gives_the_same_table() -> None:
    assert Table.parse(file_of(RECORD)).record == RECORD


@pytest.mark.parametrize(
    ("workload", "bins"),
    [
        ((0, 0, 0, 0), (0, 0, 0, 0)),
        ((2047, 255, 1, 1.99), (0, 0, 0, 0)),
        ((2048, 255, 1, 1.99), (1, 0, 0, 0)),
        ((0, 256, 1, 0), (0, 1, 0, 0)),
        ((131071, 16383, 8191, 9999.9), (1, 1, 0, 1)),
        ((131072, 0, 0, 0), None),
        ((0, 16384, 0, 0), None),
        ((0, 0, 8192, 0), None),
        ((0, 0, 0, 10_000), None),
        ((-1, 0, 0, 0), None),
    ],
)
def test_the_lookup(
    workload: tuple[float, float, float, float], bins: tuple[int, int, int, int] | None
) -> None:
    cell = TABLE.find(*workload)
    if bins is None:
        assert cell is None
    else:
        assert cell is not None
        assert cell.remote.ttft_ms == numbered(*bins)[0]
        assert cell.local.ttft_ms == numbered(*bins)[2]


def test_real_traffic_is_within_bins_that_reach_far_enough() -> None:
    cell = TABLE.find(27_000, 4_800, 636, 3.0)  # p90 of a production chat trace
    assert cell is not None
    assert cell.label == "context=[2048,131072) new=[256,16384) output=[0,8192) qps=[2,10000)"


def changed(**changes: Any) -> TableRecord:
    return structs.replace(RECORD, **changes)


def with_axis(name: str, *bins: Bin) -> TableRecord:
    return changed(axes=structs.replace(AXES, **{name: bins}))


def with_ttft(**changes: Any) -> TableRecord:
    first = RECORD.cells[0]
    ttft = structs.replace(first.local.ttft_ms, **changes)
    local = structs.replace(first.local, ttft_ms=ttft)
    return changed(cells=(structs.replace(first, local=local), *RECORD.cells[1:]))


def with_rates(*rates: float) -> TableRecord:
    """Of one cell's local route; all others are known."""
    first = table_record(numbered, rates=(400.0, 450.0)).cells[0]
    local = structs.replace(first.local, tokens_per_s=rates)
    return with_first(structs.replace(first, local=local))


def with_medians(*medians: float) -> TableRecord:
    """Of one cell's local route."""
    first = RECORD.cells[0]
    ttft = structs.replace(first.local.ttft_ms, medians=medians)
    local = structs.replace(first.local, ttft_ms=ttft)
    return changed(cells=(structs.replace(first, local=local), *RECORD.cells[1:]))


def with_first(cell: CellRecord) -> TableRecord:
    known = table_record(numbered, rates=(400.0, 450.0))
    return structs.replace(known, cells=(cell, *known.cells[1:]))


def moved(cell: CellRecord, *bins: int) -> CellRecord:
    return structs.replace(cell, bins=bins)


NAN = float("nan")


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (changed(cells=RECORD.cells[1:]), r"cell \[0, 0, 0, 0\] is missing"),
        (changed(cells=(*RECORD.cells, RECORD.cells[0])), "stands twice"),
        (
            changed(cells=(*RECORD.cells, moved(RECORD.cells[0], 9, 0, 0, 0))),
            r"cell \[9, 0, 0, 0\] lies outside the axes",
        ),
        (with_axis("qps", Bin(0, 2, 1), Bin(1, 16, 4)), "axis qps: bins 0 and 1 overlap"),
        (with_axis("qps", Bin(0, 2, 1), Bin(3, 16, 4)), "axis qps: a hole between bins 0 and 1"),
        (with_axis("qps", Bin(0, NAN, 1), Bin(2, 16, 4)), "axis qps, bin 0: 0 <= low <= at < high"),
        (with_axis("qps"), "axis qps has no bins"),
        (with_ttft(median=NAN), r"cell \[0, 0, 0, 0\] local: ttft_ms.median must be above 0"),
        (with_ttft(p99=1.0), "ttft_ms.p99 must be at least the median"),
        (with_ttft(n=0), "ttft_ms.n must be at least 1"),
        (with_rates(), "tokens_per_s must be given for all .* or for none, 1 lack it"),
        (with_rates(9.0, 0.0, 9.0), r"local: tokens_per_s must be above 0, got 0"),
        (with_rates(9.0, NAN, 9.0), r"local: tokens_per_s must be above 0, got nan"),
        (with_rates(9.0, 9.0), r"local: tokens_per_s must have 3 values, got 2"),
        (with_medians(9.0, 9.0), r"local: ttft_ms.medians must have 3 values, got 2"),
        (with_medians(9.0, 9.0, 0.0), r"local: ttft_ms.medians must be above 0, got 0"),
        (changed(prefill_ms_per_token=NAN), "prefill_ms_per_token must be above 0"),
        (changed(model=""), "model is empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(record: TableRecord, named: str) -> None:
    with pytest.raises(TableError, match=named):
        Table(record)


def test_all_errors_at_once_but_not_endlessly() -> None:
    with pytest.raises(TableError) as caught:
        Table(changed(cells=(), prefill_ms_per_token=-1.0))
    assert str(caught.value).count(";") == len(RECORD.cells)
    many = with_axis("output_tokens", *(Bin(i, i + 1, i) for i in range(50)))
    with pytest.raises(TableError, match=r"and .* more$"):
        Table(many)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"{", "no decision table"),
        (b"[]", "no decision table"),
        (b'{"version": 2}', "version 2, this reads version 1"),
        (file_of(RECORD).replace(b'"shape"', b'"shap"'), "shap"),
        (file_of(RECORD).replace(b'"median":5.0', b'"median":null', 1), "Expected `float`"),
    ],
)
def test_what_is_no_table_is_refused(data: bytes, named: str) -> None:
    with pytest.raises(TableError, match=named):
        Table.parse(data)


def test_throughput_is_what_a_table_may_lack() -> None:
    known = Table(table_record(numbered, rates=(400.0, 450.0)))
    known.require_throughput()
    assert Table.parse(file_of(known.record)).record == known.record
    remote, local = known.interpolate(3000, 100, 100, 3)
    assert (remote.tokens_per_s, local.tokens_per_s) == pytest.approx((400.0, 450.0))
    assert b"tokens_per_s" not in file_of(RECORD)
    # Seeds differ by their arrivals, and both routes have the same ones: local always adds a tenth.
    paired = Table(with_rates(110.0, 440.0, 220.0)).record.cells[0]
    remote_rates = structs.replace(paired.remote, tokens_per_s=(100.0, 400.0, 200.0))
    cell = Table(with_first(structs.replace(paired, remote=remote_rates))).cells[0]
    assert cell.local.tokens_per_s / cell.remote.tokens_per_s == pytest.approx(1.1)
    assert cell.noise.throughput == pytest.approx(0.0, abs=1e-9)
    assert Table(with_rates(360.0, 440.0, 400.0)).cells[0].noise.throughput > 0.05
    with pytest.raises(TableError, match="it has no throughput: build it anew"):
        TABLE.require_throughput()


def test_costs_of_seeds_need_the_medians_of_both_routes() -> None:
    assert Table(with_medians(9.0, 8.0, 7.0)).cells[0].by_seed == ()


def test_a_table_is_for_one_model() -> None:
    TABLE.require(("other", "/models/fake/"))
    with pytest.raises(TableError, match="measured with fake, the workers serve /models/fakes"):
        TABLE.require(("/models/fakes",))


def test_interpolation_meets_the_cells_at_their_points() -> None:
    for cell, record in zip(TABLE.cells, RECORD.cells, strict=True):
        points = [bins[i].at for (_, bins), i in zip(AXES.each(), record.bins, strict=True)]
        remote, local = TABLE.interpolate(*points)
        assert remote.ttft_ms == pytest.approx(cell.remote.ttft_ms)
        assert local.tpot_ms == pytest.approx(cell.local.tpot_ms)


workloads = st.tuples(
    st.floats(0, 200_000), st.floats(0, 20_000), st.floats(0, 9_000), st.floats(0, 20)
)


@given(workloads)
def test_interpolated_costs_lie_between_the_cells(
    workload: tuple[float, float, float, float],
) -> None:
    remote, local = TABLE.interpolate(*workload)
    for costs, of_cells in (
        (remote, [c.remote for c in TABLE.cells]),
        (local, [c.local for c in TABLE.cells]),
    ):
        assert isinstance(costs, Costs)
        low, high = min(c.ttft_ms for c in of_cells), max(c.ttft_ms for c in of_cells)
        assert low * (1 - 1e-9) <= costs.ttft_ms <= high * (1 + 1e-9)


def test_costs_grow_steadily_between_two_points() -> None:
    values = [TABLE.interpolate(c, 64, 128, 1)[0].ttft_ms for c in range(1000, 8001, 500)]
    assert values == sorted(values)
    assert values[0] < values[7] < values[-1]


def test_quiet_times_meet_the_measured_ones_and_are_steady_between() -> None:
    table = Table(table_record(lambda c, n, _o, _q: (100.0 + 100 * c, 9.0, 50.0 + 60 * n, 9.0)))
    assert table.quiet_ttft_ms(1000, 64, 0) == pytest.approx((100.0, 50.0))
    assert table.quiet_ttft_ms(1000, 1024, 0) == pytest.approx((100.0, 110.0))
    assert table.quiet_ttft_ms(10**6, 1, 0) == pytest.approx((200.0, 50.0)), "the nearest point"
    between = [table.quiet_ttft_ms(1000, new, 0)[1] for new in range(64, 1025, 32)]
    assert between == pytest.approx([50.0 + 2 * step for step in range(31)]), "linear in tokens"


def test_the_reply_before_a_turn_is_prefilled_on_the_remote_route_alone() -> None:
    axes = structs.replace(AXES, output_tokens=(Bin(0, 200, 100), Bin(200, 8192, 400)))
    record = table_record(
        lambda _c, _n, o, _q: (100.0 + 60 * o, 9.0, 40.0 + 22.5 * o, 9.0), axes=axes
    )
    table = Table(record)
    times = [table.quiet_ttft_ms(1000, 64, reply) for reply in (0, 100, 400, 1400)]
    assert [remote for remote, _ in times] == pytest.approx([100.0, 100.0, 160.0, 260.0])
    assert [local for _, local in times] == pytest.approx([50.0] * 4)
    assert table.quiet_ttft_ms(1000, 64, 200)[0] == pytest.approx(120.0)


def test_waits_beside_decodes_are_those_of_busy_cells() -> None:
    def waits(remote_ms: float, local_ms: float, running: float) -> tuple[float, float]:
        record = table_record(lambda *_: (remote_ms, 10.0, local_ms, 10.0), running=running)
        cells = tuple(
            structs.replace(
                cell,
                remote=structs.replace(cell.remote, quiet_ttft_ms=80.0),
                local=structs.replace(cell.local, quiet_ttft_ms=50.0),
            )
            for cell in record.cells
        )
        table = Table(structs.replace(record, cells=cells))
        remote_ms, local_ms = table.decode_waits.added_ttft_ms(64, 64, 10.0)
        assert (remote_ms, local_ms) == table.decode_waits.added_ttft_ms(10_000, 10_000, 10.0)
        return round(remote_ms / 10, 6), round(local_ms / 10, 6)

    assert waits(100.0, 150.0, 20.0) == (2.0, 10.0)  # 20 and 100 ms longer, always busy
    assert waits(70.0, 51.0, 20.0) == (0.5, 0.5)  # half of a step, at least
    assert waits(100.0, 150.0, 0.1) == (0.5, 1.5)  # hardly ever busy: not measured


def test_an_append_in_a_larger_batch_has_a_longer_step_of_its_own() -> None:
    """With one request steps take 8 ms. The sweep's appends took 26 ms longer, with steps of 12."""
    record = table_record(lambda _c, _n, _o, q: (100.0, 8.0 + 4 * q, 50.0, 8.0 + 4 * q))
    cells = tuple(
        structs.replace(
            cell,
            remote=structs.replace(cell.remote, quiet_ttft_ms=88.0, running=20.0 * cell.bins[3]),
            local=structs.replace(cell.local, quiet_ttft_ms=24.0),
        )
        for cell in record.cells
    )
    table = Table(structs.replace(record, cells=cells))
    remote_ms, local_ms = table.decode_waits.added_ttft_ms(64, 64, 12.0)
    assert (remote_ms, local_ms) == pytest.approx((12.0, 26.0)), "as measured: 22 ms are waits"
    remote_ms, local_ms = table.decode_waits.added_ttft_ms(64, 64, 24.0)
    assert (remote_ms, local_ms) == pytest.approx((24.0, 44.0 + 16.0)), "16 ms above the least"


def test_waits_are_not_those_behind_a_busy_prefill_worker() -> None:
    def remote_waits(shape: str) -> float:
        record = table_record(lambda *_: (100.0, 10.0, 50.0, 10.0), running=20.0)
        cells = tuple(
            structs.replace(
                cell, remote=structs.replace(cell.remote, quiet_ttft_ms=50.0 + 40.0 * cell.bins[0])
            )
            for cell in record.cells
        )
        table = Table(structs.replace(record, cells=cells, shape=shape))
        remote_ms, _ = table.decode_waits.added_ttft_ms(0, 0, 10.0)
        return round(remote_ms / 10, 6)

    # One turn a second. Of two turns one computes the context, at 0.1 ms a token.
    assert remote_waits("1P1D") == 5.0, "idle with 1,000 tokens of context, busy with 8,000"
    assert remote_waits("40P1D1R") == 3.0, "idle in all cells"
    assert remote_waits("1P90D") == 0.5, "busy in all cells"


def test_waits_grow_with_the_chunks_of_an_append() -> None:
    axes = structs.replace(
        AXES, new_tokens=(Bin(0, 256, 100), Bin(256, 2048, 1100), Bin(2048, 9000, 3100))
    )
    record = table_record(
        lambda _c, n, *_: (50.0, 10.0, 60.0 + 40.0 * n, 10.0), axes=axes, running=20.0
    )
    cells = tuple(
        structs.replace(cell, local=structs.replace(cell.local, quiet_ttft_ms=50.0))
        for cell in record.cells
    )
    table = Table(structs.replace(record, cells=cells))
    news = (0, 100, 600, 1100, 2100, 3100, 8000)
    found = [round(table.decode_waits.added_ttft_ms(0, new, 10.0)[1], 3) for new in news]
    short, long, longest = found[1], found[3], found[5]
    assert short < long < longest
    assert found[2] == pytest.approx((short + long) / 2, abs=0.01)
    assert found[4] == pytest.approx((long + longest) / 2, abs=0.01)
    assert (found[0], found[6]) == (short, longest)


def waiting(local_ms: Sequence[float], running: Sequence[float] = ()) -> Callable[[float], float]:
    """Local turns at rest take 40 ms. By bin of new tokens: their TTFT beside decodes of 10 ms."""
    bins = (Bin(0, 256, 100), Bin(256, 2048, 2000), Bin(2048, 9000, 4000))
    axes = structs.replace(AXES, new_tokens=bins[: len(local_ms)])
    record = table_record(lambda _c, n, *_: (50.0, 10.0, local_ms[n], 10.0), axes=axes)
    cells = tuple(
        structs.replace(
            cell,
            remote=structs.replace(cell.remote, running=running[cell.bins[1]] if running else 20.0),
            local=structs.replace(cell.local, quiet_ttft_ms=40.0),
        )
        for cell in record.cells
    )
    table = Table(structs.replace(record, cells=cells))
    return lambda appended: table.decode_waits.added_ttft_ms(0, appended, 10.0)[1]


def test_an_append_of_one_chunk_waits_like_a_short_one() -> None:
    """Each 1,000 tokens from 1,000 on take 40 ms of decodes between chunks."""
    longer_ms = waiting((60.0, 100.0, 180.0))
    found = [longer_ms(tokens) for tokens in (0, 100, 500, 1000, 1500, 2000, 3000, 4000, 9000)]
    assert found == pytest.approx([20.0, 20.0, 20.0, 20.0, 40.0, 60.0, 100.0, 140.0, 140.0])


def test_waits_between_two_points_are_linear_where_no_third_one_shows_the_chunks() -> None:
    longer_ms = waiting((60.0, 100.0))
    assert [longer_ms(tokens) for tokens in (100, 1050, 2000)] == pytest.approx([20.0, 40.0, 60.0])
    longer_ms = waiting((60.0, 100.0, 80.0))  # noise: the longest waits less
    assert [longer_ms(tokens) for tokens in (1050, 3000)] == pytest.approx([40.0, 50.0])


def test_appends_that_were_not_measured_beside_decodes_wait_like_shorter_ones() -> None:
    longer_ms = waiting((60.0, 100.0, 180.0), running=(20.0, 20.0, 0.1))
    assert [longer_ms(tokens) for tokens in (2000, 4000)] == pytest.approx([60.0, 60.0])


def test_waits_of_appends_do_not_depend_on_the_prefill_worker() -> None:
    """It computes most of the time, and appends take long at the higher rate alone."""
    record = table_record(lambda _c, _n, _o, q: (100.0, 10.0, 80.0 + 900 * q, 10.0), running=20.0)
    cells = tuple(
        structs.replace(cell, local=structs.replace(cell.local, quiet_ttft_ms=50.0))
        for cell in record.cells
    )
    _, local_ms = Table(
        structs.replace(record, cells=cells, shape="1P90D")
    ).decode_waits.added_ttft_ms(64, 64, 10.0)
    assert local_ms == pytest.approx(30.0)


def test_a_turn_at_rest_takes_no_longer_than_under_load() -> None:
    record = table_record(lambda *_: (100.0, 10.0, 50.0, 10.0))
    cells = tuple(
        structs.replace(cell, remote=structs.replace(cell.remote, quiet_ttft_ms=400.0))
        for cell in record.cells
    )
    assert Table(structs.replace(record, cells=cells)).quiet_ttft_ms(1000, 64, 0)[0] == (
        pytest.approx(100.0)
    )


def test_an_append_without_a_token_takes_what_is_no_computing() -> None:
    def empty_ms(quiet_ms: float) -> float:
        return Table(table_record(lambda *_: (100.0, 10.0, quiet_ms, 10.0))).empty_append_ms

    assert empty_ms(50.0) == pytest.approx(50.0 - 64 * 0.2)
    assert empty_ms(12.0) == 10.0, "a step at least"
