"""What a newcomer types: ``make demo`` and ``make serve``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from eval import tiny_model

PPD_EVAL = Path(sys.executable).with_name("ppd-eval")


def descendants_with(log_folder: Path) -> list[psutil.Process]:
    """Processes that write into ``log_folder``."""
    return [p for p in psutil.process_iter() if _writes_into(p, log_folder)]


def _writes_into(process: psutil.Process, folder: Path) -> bool:
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink().is_relative_to(folder)
    except OSError:
        return False


@contextmanager
def serving(*options: str | Path) -> Iterator[subprocess.Popen[str]]:
    """``ppd-eval serve``, which stops its workers when it is terminated."""
    process = subprocess.Popen([PPD_EVAL, "serve", *options], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()


def test_the_demo(tmp_path: Path) -> None:
    ran = subprocess.run(
        [PPD_EVAL, "demo", "--model", tiny_model.ensure(), "--logs", tmp_path],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["routes"] == ["remote", "local", "local", "local", "local"]
    assert result["identical_to_monolithic"] is True
    assert result["cached_tokens"][0] == 0
    for cached, context in zip(result["cached_tokens"], result["context_tokens"], strict=True):
        assert max(0, context - 1) <= cached <= context
    assert all(new > 0 for new in result["new_tokens"])
    assert result["delta_identical_to_monolithic"] is True
    for column in ("ttft_ms", "delta_ttft_ms", "full_ttft_ms"):
        assert len(result[column]) == 5
        assert min(result[column]) > 0
    assert len(result["answers"]) == 5
    assert all(answer in ran.stdout for answer in result["answers"][0].split())
    assert not descendants_with(tmp_path)


def test_serve_prints_how_to_chat_and_stops_on_a_signal(tmp_path: Path) -> None:
    with serving("--model", tiny_model.ensure(), "--logs", tmp_path) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("Stop it"):
                break
        found = re.search(r"curl -i (http://\S+)/v1/chat/completions", said)
        assert found is not None, said
        body = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
        url = f"{found[1]}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0
    assert not descendants_with(tmp_path)
