"""Every raw row and every shipped table was measured on a commit of this history."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.raw_rows import read_rows

ROOT = Path(__file__).parents[2]


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def commits() -> Iterator[tuple[str, str]]:
    """Yield file and commit of all rows; of rows without one, that of their run's header row."""
    for path in sorted((ROOT / "results").glob("*.jsonl")):
        told = {str(row["commit"]).rstrip("+") for _, row in read_rows(path) if "commit" in row}
        for commit in told or {"no commit"}:
            yield f"results/{path.name}", commit
    for path in sorted((ROOT / "tables").glob("*.json")):
        measured_at = str(json.loads(path.read_text())["provenance"]["commit"])
        for commit in measured_at.split(" and "):  # a sweep may have been continued at another one
            yield f"tables/{path.name}", commit.rstrip("+")


def test_rows_and_tables_are_of_commits_in_this_history() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git history here, as in a tarball")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        pytest.skip("a shallow clone has no history to look in")
    known: dict[str, bool] = {}
    missing: dict[str, set[str]] = {}
    for file, commit in commits():
        if commit not in known:
            known[commit] = git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0
        if not known[commit]:
            missing.setdefault(file, set()).add(commit)
    assert not missing
