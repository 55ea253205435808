"""The report: only what raw files say, and clear words for what they do not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eval import cli
from eval.compare.config import Comparison, Trace
from eval.policies.cells import TTFT, summarize
from eval.report.areas import payoff
from eval.report.drawing import INK, round_ticks
from eval.report.figures import LOOKS, line_of, over_qps, pareto
from eval.report.page import figure_files, html, markdown
from eval.report.policies import complete
from eval.report.results import Results
from eval.report.sections import sections
from eval.report.sources import GridRow, NotMeasured, Source, newest, read_source
from eval.report.study_figures import weights
from ppd.errors import ConfigError
from ppd.score import Weights
from tests.unit.test_compare import rows as compare_rows
from tests.unit.test_policy_grid import grid_row
from tests.unit.test_scenarios import run_row

ORIGIN = {"commit": "c0ffee", "hardware": "2 cores of it", "seed": 0, "model": "tiny"}
ORIGIN |= {"at": "2026-11-21T20:00:00+00:00"}


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def grid_rows() -> list[dict[str, Any]]:
    return [
        grid_row(side, seed, ttft=ttft * (1 + 0.1 * seed), qps=qps, turns=turns)
        for side, ttft in (("replica", 40.0), ("pd", 90.0), ("ppd", 50.0))
        for qps, turns in ((1.0, 4), (2.0, 4), (2.0, 2), (2.0, 8))
        for seed in (0, 1, 2)
    ]


def route_row(gbps: float, new: float, **changes: Any) -> dict[str, Any]:
    point = {"context_tokens": 8192.0, "new_tokens": new, "output_tokens": 256.0, "qps": 1.5}
    remote = {"remote_ttft_ms": 40.0, "remote_ttft_p90_ms": 80.0, "remote_tpot_ms": 7.0}
    local = {"local_ttft_ms": 10.0, "local_ttft_p90_ms": 40.0, "local_tpot_ms": 8.0}
    named = {"row": "cell", "profile": "a-gpu", "link_gbps": gbps, "choice": "local"}
    return {**named, **point, **remote, **local, **ORIGIN, **changes}


def fill(folder: Path) -> None:
    ways = {"ttft_ms": [9.0, 2.0], "delta_ttft_ms": [9.0, 3.0], "full_ttft_ms": [9.0, 11.0]}
    write(folder / "demo.jsonl", [ways | ORIGIN])
    write(folder / "policy-grid.jsonl", grid_rows())
    write(folder / "route-map.jsonl", [route_row(gbps, 384) for gbps in (25.0, 100.0)])
    arms = ((0, "none"), (1, "full"), (1, "append"), (4, "full"), (4, "append"))
    cells = [(context, batch, *arm) for context in (2048, 4096) for batch in (1, 2) for arm in arms]
    keys = ("context", "batch", "prefills", "kind")
    told = {"round": 0, "tpot_ms": 4.0, "longest_gap_ms": 9.0, **ORIGIN}
    write(folder / "interference.jsonl", [dict(zip(keys, c, strict=True)) | told for c in cells])
    compared = Comparison(
        seeds=(0, 1),
        traces=(Trace("chat", "", 3),),
        weightings=(Weights(1, 1), Weights(1, 3)),
        policies=("replica", "pd", "full"),
    )
    half = {"ppd 1:1": 0.5, "ppd 1:3": 0.5, "replica": 0.1}
    turns = compare_rows(compared, lambda way, number: (100.0 * half.get(way, 1.0) + number, 5.0))
    write(folder / "compare.jsonl", [ORIGIN | row for row in turns])
    mix = {"grid": "some.toml", "conversations": 24, "qps": 2.4, "seed": 0}
    later = {"later_turns": 48, "ttft_p99_ms": 9.0, "tpot_p50_ms": 4.0, "tpot_p99_ms": 5.0}
    steps = [{"w_ttft": w, "w_tpot": 1 - w, "local_share": w, "ttft_p50_ms": 8.0} for w in (0, 1)]
    write(folder / "weights-cpu.jsonl", [step | later | {"mix": mix} | ORIGIN for step in steps])
    shape: dict[str, Any] = {"requests": 4, "prompt": 16, "reply": 8, "batch": 4, "scale": 16}
    shape |= {"round": 0, **ORIGIN}
    runs = [run_row("smoke", side) | shape for side in ("1R", "2R", "pd")]
    write(folder / "scenarios.jsonl", runs)
    spread = {"mean": 5.0, "p50": 5.0, "p90": 6.0, "p99": 7.0}
    check = {"row": "run", "kind": "single", "round": 0, "turns": 9, "output_tokens_per_s": 90.0}
    check |= {"ttft_ms": spread, "tpot_ms": spread, "itl_ms": spread, "engine": {}, **ORIGIN}
    write(
        folder / "check-load.jsonl",
        [{"row": "turn"}, *(check | {"client": who} for who in ("ours", "aiperf"))],
    )
    claim = {
        "row": "claim",
        "group": "wins by TTFT",
        "name": "4R",
        "paper": 63.3,
        "simulated": 39.4,
    }
    write(folder / "simulate-paper.jsonl", [claim, {"row": "run", **ORIGIN}])
    write(folder / "payoff.jsonl", [verdicts("chat")])


def verdicts(trace: str) -> dict[str, Any]:
    """One comparison, which ``ppd`` wins."""
    way = {"ttft_p50_ms": 20.0, "ttft_p90_ms": 40.0, "kv_mb_moved": 1.0}
    static = ["pd-full", "pd", "full", "threshold", "threshold:uncached=512"]
    verdict = {
        "weights": "1:1",
        "at": "each",
        "costs": {"pd": 2.0, "ppd 1:1": 1.8},
        "best_static": "pd",
        "difference": -0.2,
        "better": True,
        "p": 0.001,
        "p_again": 0.5,
    }
    return {
        "row": "verdicts",
        "trace": trace,
        "windows": 12,
        "ways": dict.fromkeys([*static, "replica", "ppd 1:1"], way),
        "verdicts": [verdict],
        "profile": "llama",
        "shape": "1P_1pD",
        "link_gbps": 100.0,
        "calibration_factor": 1.0,
        "raw_commits": ["0123456789ab"],
        **ORIGIN,
    }


def test_traffic_of_another_machine_is_shown_where_it_differs(tmp_path: Path) -> None:
    def served(trace: str, link_gbps: float, qps: float) -> dict[str, Any]:
        asked = {"workload": "turns:3", "also": [], "poisson": True, "qps": qps}
        row = verdicts(trace) | {"conversations": 10, "later_turns": 20, "link_gbps": link_gbps}
        row |= {"windows": 2, "planned_conversations": 18}
        row["ways"] = {"pd": {"decode_batch": 3.0}}
        return row | {"asked": asked | {"conversations": 10}}

    rows = [served("chat", 100.0, 2.0), served("agents", 100.0, 2.0)]
    rows += [served("chat", 25.0, 1.5), served("agents", 25.0, 2.0), served("long", 25.0, 2.0)]
    write(tmp_path / "payoff.jsonl", rows)
    text = payoff.traffic(Results(tmp_path)).text
    named = re.findall(
        r"^\| (\w+(?:, .*?)?) \| synthetic \| Poisson, ([\d.]+)/s", text, re.MULTILINE
    )
    assert "Simulator of 0123456, profile llama, `1P_1pD`." in text
    assert text.count("| 9 x 2 |") == 4, "a window may hold fewer than were asked for"
    assert named == [
        ("chat", "2"),
        ("agents", "2"),
        ("chat, 25 Gb/s", "1.5"),
        ("long, 25 Gb/s", "2"),
    ]


def test_an_empty_measurement_is_reported_and_nothing_is_drawn(tmp_path: Path) -> None:
    found = sections(Results(tmp_path))
    assert all(isinstance(one.source, NotMeasured) for one in found)
    page, text = html(found), markdown(found, "figures")
    assert page.count("Not measured:") == text.count("Not measured:") == len(found)
    assert "run <code>make policy-grid RECORD=results/policy-grid.jsonl</code>" in page
    assert "<svg" not in page
    assert "| " not in text
    assert list(figure_files(found)) == []


def test_a_whole_report_needs_nothing_else_and_names_every_origin(tmp_path: Path) -> None:
    fill(tmp_path)
    found = sections(Results(tmp_path))
    page = html(found)
    assert "Not measured" not in page
    assert "`" not in page, "names are code there, too"
    assert page.count("<svg ") == 8
    assert not re.search(r'(src|href)="(?!#)', page.replace('xlink:href="#', 'href="#'))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page):
        assert "".join(target) in ids
    assert INK not in page
    assert page.count("commit c0ffee · 2 cores of it · seed 0 · model tiny · 2026-11-21") == 8
    assert page.count("commit abc · 2 cores · seeds 0, 1, 2") == 4


def test_real_traffic_names_the_better_policy_and_leaves_out_incomplete_seeds(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "compare.jsonl").read_text().splitlines()]
    rows = [row for row in rows if (row["way"], row["seed"]) != ("replica", 1)]
    write(tmp_path / "compare.jsonl", rows)
    (found,) = (one for one in sections(Results(tmp_path)) if one.name == "real-traffic")
    ways, costs = found.tables
    assert [row[0] for row in ways.rows] == ["replica", "pd", "full", "ppd 1:1", "ppd 1:3"]
    assert costs.caption == "chat: costs, 1 seeds"
    even = costs.rows[0]
    assert even[:5] == ("1:1", "p50", "1.56", "pd", "2")  # replica is cheaper, and no rival
    assert even[7] == "beats"
    assert found.figure is not None


def test_the_command_writes_both_and_names_what_is_missing(tmp_path: Path, capsys: Any) -> None:
    raw = tmp_path / "results"
    raw.mkdir()
    fill(raw)
    (raw / "check-load.jsonl").unlink()
    page, text = tmp_path / "made/report.html", tmp_path / "made/REPORT.md"
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "--results", str(raw), "--html", str(page), "--markdown", str(text)])
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["not_measured"] == ["results/check-load.jsonl"]
    figures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text.read_text())
    assert len(figures) == 8
    assert all((text.parent / figure).read_text().startswith("<svg") for figure in figures)
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{broken", "no JSON"),
        ('"a word"', "must be a JSON object"),
        (json.dumps(grid_row("pd", qps="fast")), r"Expected `float`, got `str` - at `\$.qps`"),
        (json.dumps({"side": "pd"}), "missing required field"),
    ],
)
def test_a_broken_file_is_an_error_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "policy-grid.jsonl"
    file.write_text(json.dumps(grid_row("pd")) + f"\n{line}\n" + json.dumps(grid_row("pd")) + "\n")
    with pytest.raises(ConfigError, match=rf"policy-grid\.jsonl:2: .*{said}"):
        sections(Results(tmp_path))


def test_a_file_that_tells_no_origin_is_refused(tmp_path: Path) -> None:
    claim = {"row": "claim", "group": "wins by TTFT", "name": "4R", "paper": 1.0, "simulated": 2.0}
    write(tmp_path / "simulate-paper.jsonl", [claim])
    with pytest.raises(ConfigError, match="no row has commit, hardware and seed"):
        sections(Results(tmp_path))


def test_an_empty_file_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "policy-grid.jsonl").touch()
    found = read_source(tmp_path, "policy-grid.jsonl", GridRow, "make policy-grid")
    assert isinstance(found, NotMeasured)


def test_only_the_newest_grid_of_a_file_is_shown(tmp_path: Path) -> None:
    write(tmp_path / "policy-grid.jsonl", [grid_row("pd", grid="old"), grid_row("ppd")])
    source = read_source(tmp_path, "policy-grid.jsonl", GridRow, "")
    assert isinstance(source, Source)
    kept = newest(source, "grid")
    assert [row["side"] for row in kept.rows] == ["ppd"]
    assert len(kept.origins) == 1


def test_points_that_some_have_not_met_have_no_winner() -> None:
    rows = [grid_row(side, qps=qps) for side in ("pd", "ppd") for qps in (1.0, 2.0)]
    rows.append(grid_row("pd", seed=1, qps=2.0))
    rows.append(grid_row("pd", qps=4.0))
    assert {cell.qps for cell in complete(summarize(rows))} == {1.0}


def test_a_busy_machine_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "policy-grid.jsonl", [grid_row("pd", load_average=n) for n in (2.1, 9.8)])
    source = read_source(tmp_path, "policy-grid.jsonl", GridRow, "")
    assert isinstance(source, Source)
    assert "load average 2.1 to 9.8" in source.origin()


def test_a_curve_has_the_seeds_around_its_median_and_no_empty_points() -> None:
    none = dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"))
    rows = [grid_row("ppd", seed, ttft=ttft) for seed, ttft in enumerate((50.0, 70.0, 40.0))]
    rows.append(grid_row("ppd", qps=4.0, latencies={"all": none, "later": none}, success_rate=0.0))
    rows.append(grid_row("pd"))
    line = line_of(summarize(rows), "ppd", TTFT, lambda cell: cell.qps)
    assert (line.x, line.middle, line.least, line.most) == ([2.0], [50.0], [40.0], [70.0])


def test_figures_name_all_that_they_show_and_mark_what_failed() -> None:
    rows = grid_rows()
    drawn = over_qps(summarize(rows))
    for side in ("replica", "pd", "ppd"):
        assert f"<!-- {side} -->" in drawn
        assert LOOKS[side][0] in drawn
    assert "<!-- fails -->" not in drawn
    rows[0]["success_rate"] = 0.5
    assert "<!-- fails -->" in over_qps(summarize(rows))
    assert over_qps(summarize(rows)) == over_qps(summarize(rows))
    assert "<!-- output tokens a second -->" in pareto(summarize(rows))


def test_weights_draw_every_mix() -> None:
    point = {"w_ttft": 0.5, "local_share": 0.5, "ttft_p50_ms": 9.0, "tpot_p50_ms": 3.0}
    drawn = weights({"one.toml": [point], "two.toml": [point]})
    assert "<!-- one.toml -->" in drawn
    assert "<!-- two.toml -->" in drawn


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (9.0, 700.0, [10, 20, 50, 100, 200, 500]),
        (3.9, 16.0, [5, 7, 10, 15]),
        (0.4, 0.62, [0.4, 0.45, 0.5, 0.55, 0.6]),
        (5.0, 5.1, [5.0]),
    ],
)
def test_ticks_are_round_and_enough(low: float, high: float, ticks: list[float]) -> None:
    assert round_ticks(low, high) == ticks


def test_a_grid_where_everything_failed_is_drawn_all_the_same() -> None:
    none = dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"))
    lost: dict[str, Any] = {
        "success_rate": 0.0,
        "latencies": {"all": none, "later": none, "first": none},
    }
    cells = summarize([grid_row(side, **lost) for side in ("pd", "ppd")])
    assert "<!-- fails -->" in over_qps(cells)
    assert "<svg" in pareto(cells)
