"""The wheel: package names, scripts and entry point."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from eval.tiny_model import ModelSpec

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files, as an installation has them."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    # A copy: a build leaves its intermediate files in the source folder.
    source = out / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist"))
    subprocess.run([*build, str(out), str(source)], check=True, timeout=120)
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
