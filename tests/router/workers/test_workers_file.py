"""The file that lists workers: when it is read again, and what is wrong with it."""

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
    told = f'prefill = ["{P}/"]\ndecode = ["{D}"]'.encode()
    assert parse(told, ROLES) == {P: Role.PREFILL, D: Role.DECODE}
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
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        parse(text.encode(), ROLES)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError):
        parse(b"\xff", ROLES)


def test_a_file_is_read_when_it_has_changed(path: Path) -> None:
    file = WorkersFile(str(path), ROLES, 1.0)
    assert file.look() is None
    path.write_text(f'decode = ["{D}"]')
    assert file.look() == {D: Role.DECODE}
    assert file.look() is None


def test_a_rename_is_seen_even_where_size_and_time_are_the_same(path: Path) -> None:
    file = WorkersFile(str(path), ROLES, 1.0)
    told = path.stat()
    other = path.with_name("other")
    other.write_text(path.read_text().replace(":2", ":3"))
    os.utime(other, ns=(told.st_atime_ns, told.st_mtime_ns))
    other.replace(path)
    assert file.look() == {P: Role.PREFILL, "http://127.0.0.1:3": Role.DECODE}


def test_a_wrong_change_is_told_once_and_so_is_the_next(path: Path) -> None:
    file = WorkersFile(str(path), ROLES, 1.0)
    for text in ("decode = 1", "decode = 2 "):
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(f"{path}: Expected `array`")):
            file.look()
        assert file.look() is None


def test_a_file_that_is_gone_is_told_once_and_read_when_it_is_back(path: Path) -> None:
    file = WorkersFile(str(path), ROLES, 1.0)
    away = path.rename(path.with_name("away"))
    with pytest.raises(ConfigError, match="No such file"):
        file.look()
    assert file.look() is None
    away.rename(path)
    assert file.look() == {P: Role.PREFILL, D: Role.DECODE}
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        file.look()


@pytest.mark.parametrize("name", ["absent.toml", "wrong.toml"])
async def test_a_router_does_not_start_with_a_wrong_file(tmp_path: Path, name: str) -> None:
    write_wrong(tmp_path / "wrong.toml")
    file = str(tmp_path / name)
    with pytest.raises(ConfigError, match=re.escape(file)):
        async with running(RouterConfig(port=0, policy="full", workers_file=file)):
            raise AssertionError("it has started")


def write_wrong(path: Path) -> None:
    path.write_text("decode = 1")
