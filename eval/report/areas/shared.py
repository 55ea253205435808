"""What the store that routers share costs: from ``bench-shared`` rows."""

from __future__ import annotations

from ..parts import Block, Table, block, short
from ..results import Results

_FILE = "bench-shared.jsonl"
_TIMES = (
    *("queue_us_median", "queue_us_p99", "own_us_per_request", "others_us_per_record"),
    *("visible_ms_median", "visible_ms_p99"),
)
_SIZES = ("router_bytes_per_session", "store_bytes_per_record", "store_bytes_per_record_alone")


def cost(results: Results) -> Block:
    """Return the time and the memory that sharing takes, at the rates of the newest commit."""
    rows = results.rows(_FILE).newest()
    timed = [
        (f"{row['rate']:,}", *(short(row[name]) for name in _TIMES))
        for row in sorted(rows.rows, key=lambda row: int(row["rate"]))
    ]
    row = rows.rows[-1]
    sizes = (f"{row[name]:,}" for name in ("sessions", *_SIZES))
    sized = [(*sizes, short(row["catch_up_s"]))]
    head = (
        *("requests/s of each router", "queueing p50, us", "p99, us"),
        *("own record, us", "another's record, us", "visible p50, ms", "p99, ms"),
    )
    columns = (
        *("sessions", "bytes each in a router", "bytes a record in the store"),
        *("the same, written one by one", "read at a start, s"),
    )
    caption = f"{row['routers']} routers and the store on one host; processor time of one router"
    return block(Table(head, timed, caption), Table(columns, sized), made_of=[rows])


BLOCKS = {"shared-cost": cost}
