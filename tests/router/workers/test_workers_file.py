"""The workers file: when it is read again, and its validation."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ppd.contract import Role
from ppd.errors import ConfigError
from router.config.options import RouterConfig
from router.server.run import running
from router.workers.workers_file import WorkersFile, parse

ROLES = (Role.PREFILL, Role.DECODE)
P, D = "http://127.0.0.1:1", "http://127.0.0.1:2"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "workers.toml"
    path.write_text(f'prefill = ["{P}/"]\ndecode = ["{D}"]')
    return path


def test_urls_by_role() -> None:
    data = f'prefill = ["{P}/"]\ndecode = ["{D}"]'.encode()
    assert parse(data, ROLES) == {P: Role.PREFILL, D: Role.DECODE}
    assert parse(f'replica = ["{P}"]'.encode(), (Role.REPLICA,)) == {P: Role.REPLICA}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f'decode = ["{D}", "{D}/"]', f"two workers on one URL: {D}"),
        (f'prefill = ["{D}"]\ndecode = ["{D}"]', f"two workers on one URL: {D}"),
        ('decode = ["localhost:1"]', "decode must be http://HOST:PORT, got 'localhost:1'"),
        ('decode = ["http://h:1/v1"]', "decode must have no path"),
        (f'replica = ["{P}"]', "this router uses no replica workers, only prefill, decode"),
        (f'decodes = ["{D}"]', "unknown field `decodes`"),
        (f'decode = "{D}"', "Expected `array`, got `str` - at `$.decode`"),
        ("decode = [", "Invalid value"),
        ("", "it lists no workers"),
        ("decode = []", "it lists no workers"),
    ],
)
def test_errors_are_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        parse(text.encode(), ROLES)


def test_invalid_utf8_is_refused() -> None:
    with pytest.raises(ConfigError):
        parse(b"\xff", ROLES)


def test_a_file_is_read_when_it_has_changed(path: Path) -> None:
    file = WorkersFile(str(path), ROLES, 1.0)
    assert file.read_changes() is None
    path.write_text(f'decode = ["{D}"]')
    assert file.read_changes() == {D: Role.DECODE}
    assert file.read_changes() is None


def test_a_replaced_file_is_read_even_with_the_same_size_and_time(path: Path) -> None:
    file = WorkersFile(str(path), ROLES, 1.0)
    status = path.stat()
    other = path.with_name("other")
    other.write_text(path.read_text().replace(":2", ":3"))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    assert file.read_changes() == {P: Role.PREFILL, "http://127.0.0.1:3": Role.DECODE}


def test_each_error_is_raised_once(path: Path) -> None:
    file = WorkersFile(str(path), ROLES, 1.0)
    for text in ("decode = 1", "decode = 2 "):
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(f"{path}: Expected `array`")):
            file.read_changes()
        assert file.read_changes() is None


def test_a_missing_file_is_reported_once_and_read_when_it_exists_again(path: Path) -> None:
    file = WorkersFile(str(path), ROLES, 1.0)
    away = path.rename(path.with_name("away"))
    with pytest.raises(ConfigError, match="No such file"):
        file.read_changes()
    assert file.read_changes() is None
    away.rename(path)
    assert file.read_changes() == {P: Role.PREFILL, D: Role.DECODE}
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        file.read_changes()


@pytest.mark.parametrize("name", ["absent.toml", "wrong.toml"])
async def test_a_router_does_not_start_with_a_wrong_file(tmp_path: Path, name: str) -> None:
    write_wrong(tmp_path / "wrong.toml")
    file = str(tmp_path / name)
    with pytest.raises(ConfigError, match=re.escape(file)):
        async with running(RouterConfig(port=0, policy="full", workers_file=file)):
            raise AssertionError("the router has started")


def write_wrong(path: Path) -> None:
    path.write_text("decode = 1")
