"""The wheel: package names, scripts and entry point."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import build_backend
from eval.tiny_model import ModelSpec
from ppd import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files, as an installation has them."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    # A copy: a build leaves its intermediate files in the source folder.
    source = out / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist"))
    env = {**os.environ, "PPD_COMPILE": "0"}  # a compiled one: tests/router/test_compiled.py
    subprocess.run([*build, str(out), str(source)], check=True, timeout=120, env=env)
    (wheel,) = out.glob("sglang_ppd-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def test_every_package_is_in_it(site: Path) -> None:
    renamed = {"router": "ppd_router", "eval": "ppd_eval"}
    for top in ("ppd", "sglang_patches", "router", "eval"):
        ours = {path.relative_to(ROOT / top).parent for path in (ROOT / top).rglob("__init__.py")}
        folder = site / renamed.get(top, top)
        assert {path.relative_to(folder).parent for path in folder.rglob("__init__.py")} == ours


def test_it_is_pure_python_and_says_so(site: Path) -> None:
    assert not list(site.rglob("*.so"))
    command = [sys.executable, "-P", "-m", "ppd_router.cli", "--version"]
    version = subprocess.run(
        command, env={"PYTHONPATH": str(site)}, check=True, capture_output=True, text=True
    )
    assert version.stdout == f"{__version__} (pure Python)\n"


@pytest.mark.parametrize(
    ("wanted", "compiler", "compiled"),
    [("", "cc", True), ("", "", False), ("0", "cc", False), ("1", "", True)],
)
def test_a_wheel_is_compiled_where_there_is_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: str, compiler: str, compiled: bool
) -> None:
    tool = tmp_path / "cc"
    tool.touch(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path) if compiler else "/nowhere")
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setenv("PPD_COMPILE", wanted)
    monkeypatch.chdir(ROOT)
    assert build_backend.compiles() is compiled
    needed = build_backend.get_requires_for_build_wheel()
    assert any(one.startswith("mypy") for one in needed) is compiled
    assert any(one.startswith("msgspec") for one in needed) is compiled


def test_the_licence_is_in_it(site: Path) -> None:
    (metadata,) = site.glob("*.dist-info/METADATA")
    assert "License-Expression: Apache-2.0" in metadata.read_text()
    for name in ("LICENSE", "NOTICE"):
        packed = metadata.parent / "licenses" / name
        assert packed.read_text() == (ROOT / name).read_text()


def test_names_that_would_collide_are_not_taken(site: Path) -> None:
    packages = {p.name for p in site.iterdir() if not p.name.endswith(".dist-info")}
    assert packages == {"ppd", "sglang_patches", "ppd_router", "ppd_eval", "ppd_tables"}
    assert (site / "sglang_patches/cpu/requirements/common.txt").is_file()
    page = {path.name for path in (ROOT / "router/admin/page").iterdir()}
    assert {path.name for path in (site / "ppd_router/admin/page").iterdir()} == page


def test_an_installed_router_finds_the_shipped_tables(site: Path) -> None:
    code = (
        "from ppd_router.config.options import RouterConfig\n"
        "from ppd_router.config.tables import make_policy\n"
        f"print(make_policy(RouterConfig(), [{ModelSpec().name!r}], '1P1D')[1].path)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=site,
        env={"PYTHONPATH": str(site)},
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert Path(told.stdout.strip()).parent == site / "ppd_tables"


def test_every_script_and_entry_point_leads_somewhere(site: Path) -> None:
    (entry_points,) = site.glob("*.dist-info/entry_points.txt")
    groups = configparser.ConfigParser()
    groups.read(entry_points)
    assert dict(groups["sglang.srt.plugins"]) == {"ppd": "sglang_patches:register"}
    assert set(groups["console_scripts"]) == {*("ppd-router", "ppd-worker", "ppd-eval", "ppd-pool")}
    targets = [t for group in groups.values() for t in group.values()]
    code = "import importlib\n" + "".join(
        f"getattr(importlib.import_module({t.split(':')[0]!r}), {t.split(':')[1]!r})\n"
        for t in targets
    )
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=site,
        env={"PYTHONPATH": str(site)},
        check=True,
        timeout=60,
    )


@pytest.mark.parametrize("folder", ["ppd", "router", "eval", "sglang_patches"])
def test_no_module_imports_what_has_another_name_when_installed(folder: str) -> None:
    """``router`` is ``ppd_router`` there: only relative imports find it in both."""
    wrong = re.compile(r"^\s*(?:from|import)\s+(?:router|eval|tables)\b", re.MULTILINE)
    assert not [path for path in (ROOT / folder).rglob("*.py") if wrong.search(path.read_text())]
