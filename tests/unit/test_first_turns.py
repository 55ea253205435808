"""First turns whose KV is sent by chunk and by layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs

from eval.cli import main
from eval.profiles.profile import Extend, Profile, Step, load_profile
from eval.simulation.first_turns import times, ttft_ms
from ppd.errors import ConfigError

LLAMA = load_profile("llama-3.1-8b-h100-tp1")


def step_ms(new: int, cached: int) -> float:
    return LLAMA.step_ms(Step((Extend(new, cached),)))


def test_one_chunk_is_sent_when_it_is_computed() -> None:
    alone = step_ms(2048, 0) + LLAMA.transfer_ms(2048, 100.0)
    assert ttft_ms(LLAMA, 100.0, 2048, 8192) == pytest.approx(alone)


def test_two_chunks_overlap_with_their_transfers() -> None:
    first, second = step_ms(1024, 0), step_ms(1024, 1024)
    part = LLAMA.transfer_ms(1024, 100.0)
    assert part < second, "the link waits for the second chunk"
    assert ttft_ms(LLAMA, 100.0, 2048, 1024) == pytest.approx(first + second + part)
    slow = LLAMA.transfer_ms(1024, 1.0)
    assert slow > second, "the second chunk waits for the link"
    assert ttft_ms(LLAMA, 1.0, 2048, 1024) == pytest.approx(first + 2 * slow)


def test_of_a_pipeline_by_layer_only_the_last_layer_shows() -> None:
    computed, sent = step_ms(2048, 0), LLAMA.transfer_ms(2048, 100.0)
    assert sent < computed
    assert ttft_ms(LLAMA, 100.0, 2048, 8192, 32) == pytest.approx(computed + sent / 32)


def test_gains_are_over_the_best_of_what_is_there() -> None:
    found = times(LLAMA, 100.0, [8192])
    best_ms = min(found["chunks_ms"].values())
    assert found["chunks_ms"][f"{found['best_chunk']}"] == best_ms
    assert found["layers_gain"] == pytest.approx(
        1 - min(found["layers_ms"].values()) / best_ms, abs=1e-3
    )
    mean = times(LLAMA, 100.0, [2048, 8192])["chunks_ms"]["8192"]
    each = [ttft_ms(LLAMA, 100.0, prompt, 8192) for prompt in (2048, 8192)]
    assert mean == pytest.approx(sum(each) / 2, abs=1e-3)


def test_rows_name_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"s": s, "k": 1, "t": float(s), "in": 700, "ctx": 0, "new": 700, "out": 9})
            + "\n"
            for s in range(2)
        )
    )
    out = tmp_path / "rows.jsonl"
    asked = ["simulate", "first-turns", "--profiles", "llama-3.1-8b-h100-tp1", "--prompts", "512"]
    with pytest.raises(SystemExit) as ended:
        main([*asked, "--workload", f"sessions:{trace}", "--out", f"{out}"])
    assert not ended.value.code, ended.value
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompts"] for row in rows] == ["512", "workload"] * 3
    assert {row["workload"] for row in rows} == {None, "sessions:trace.jsonl"}
    assert rows[1]["prompt_tokens"] == 700
    assert json.loads(capsys.readouterr().out)["rows"] == 6


@pytest.mark.parametrize(("flag", "value"), [("--prompts", "0"), ("--links-gbps", "-1")])
def test_sizes_are_above_0(flag: str, value: str) -> None:
    with pytest.raises(SystemExit, match="above 0"):
        main(["simulate", "first-turns", "--profiles", "llama-3.1-8b-h100-tp1", flag, value])


def test_a_model_without_known_layers_is_named() -> None:
    other = Profile(structs.replace(LLAMA.file, model="Other"), LLAMA.calibration)
    with pytest.raises(ConfigError, match="layers of Other are not known"):
        times(other, 100.0, [512])
