"""The images: linted, closed, and their steps done in a plain folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from ppd import __version__
from sglang_patches.engines import SUPPORTED

from .kubernetes import documents as rendered
from .kubernetes.dockerfile import inherited, read
from .kubernetes.tools import CHART, ROOT, Tools

FOLDER = ROOT / "deploy/images"
ROUTER, WORKER = FOLDER / "router.Dockerfile", FOLDER / "worker.Dockerfile"
OURS = ["router", "pool"]
PROGRAMS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def hadolint() -> Path:
    """The linter of Dockerfiles."""
    found = shutil.which("hadolint", path=PROGRAMS)
    if found is None:
        pytest.fail("hadolint is missing: pip install -e '.[dev]', or make setup")
    return Path(found)


@pytest.mark.parametrize("path", [ROUTER, WORKER], ids=["router", "worker"])
def test_hadolint_finds_nothing_to_complain_about(hadolint: Path, path: Path) -> None:
    lint = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_hadolint_finds_a_mistake(hadolint: Path, tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(ROUTER.read_text().replace("USER 10001:10001", "USER root"))
    lint = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True)
    assert "Last USER should not be root" in lint.stdout


@pytest.mark.parametrize("target", OURS)
def test_our_servers_are_not_root_and_have_a_health_check(tools: Tools, target: str) -> None:
    _, stages = read(ROUTER)
    steps = inherited(stages, target)
    user = next(rest for name, rest in reversed(steps) if name == "USER")
    documents = tools.render({"pool": {"enabled": True}})
    (pod,) = (
        template["spec"]
        for template in rendered.all_templates(documents)
        if rendered.component_of(template) == target
    )
    security = pod["securityContext"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
    (container,) = pod["containers"]
    (exposed,) = (rest for name, rest in steps if name == "EXPOSE")
    assert exposed.split() == [str(port["containerPort"]) for port in container["ports"]]
    (check,) = (rest for name, rest in steps if name == "HEALTHCHECK")
    # A router without workers is no worse than the one that would replace it.
    path = "/live" if target == "router" else "/health"
    assert f"http://127.0.0.1:{exposed.split()[0]}{path}" in check
    (command,) = container["command"]
    assert f'["{command}"]' in [rest for name, rest in steps if name == "ENTRYPOINT"]


@pytest.mark.parametrize(("path", "target"), [(ROUTER, t) for t in OURS] + [(WORKER, "1")])
def test_images_are_labelled(path: Path, target: str) -> None:
    _, stages = read(path)
    steps = inherited(stages, target)
    labels = " ".join(rest for name, rest in steps if name == "LABEL")
    named = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", labels))
    assert named == {"title", "description", "licenses", "vendor", "version", "revision"}
    assert ("ARG", f"VERSION={__version__}") in steps
    licence = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    assert f'licenses="{licence}"' in labels


def test_workers_are_of_an_engine_that_the_plugin_fits() -> None:
    arguments, stages = read(WORKER)
    assert arguments["SGLANG"] == f"v{SUPPORTED[-1]}"
    assert stages["1"].base == "lmsysorg/sglang:${SGLANG}"
    assert any("--no-deps" in run for run in stages["1"].all("RUN"))


def test_the_chart_names_the_images_that_are_built() -> None:
    text = ROUTER.read_text() + WORKER.read_text()
    built = set(re.findall(r"^#   docker build .* -t (\S+) \.$", text, re.MULTILINE))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    used = {f"{image['repository']}:{__version__}" for image in values["images"].values()}
    assert built == used


def test_an_image_gets_what_the_wheel_needs_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = project["tool"]["setuptools"]
    tops = {package.partition(".")[0] for package in setuptools["packages"]}
    folders = {setuptools["package-dir"].get(top, top) for top in tops}
    files = {*project["project"]["license-files"], project["project"]["readme"]}
    files |= {"MANIFEST.in", "build_backend.py", "pyproject.toml", "setup.py"}
    assert sent() == folders | files


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
@pytest.mark.timeout(900)  # 70 s of two cores; several times that on a busy machine
def test_the_routers_steps_lead_to_a_compiled_router(tmp_path: Path) -> None:
    """Those of the images, but for the operating system's packages."""
    _, stages = read(ROUTER)
    source = tmp_path / "source"
    source.mkdir()
    for name in sent():
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    # Optimization takes minutes, and changes nothing of what is tested here.
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "PATH": PROGRAMS, "CC": str(compiler)}
    environment.pop("PYTHONPATH", None)  # what is there would count as installed
    steps = [*stages["wheel"].all("RUN"), *stages["router-files"].all("RUN")]
    packages, *others = steps
    assert packages.startswith("apt-get update")
    for step in others:
        here = step.replace("/wheels", f"{tmp_path}/wheels").replace("/opt/ppd", f"{tmp_path}/ppd")
        done = subprocess.run(
            ["sh", "-euc", here], cwd=source, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{__version__} (compiled)"
    # Also what the chart's configuration needs.
    file = tmp_path / "router.toml"
    file.write_text('[kubernetes]\nnamespace = "models"\nprefill = "a=b"\ndecode = "a=c"\n')
    command = [str(tmp_path / "ppd/bin/ppd-router"), "--config", str(file), "--check-config"]
    check = subprocess.run(command, env={}, capture_output=True, text=True)
    assert check.stdout == "the configuration is right\n", check.stderr


def sent() -> set[str]:
    """The files and folders at the top that a build gets."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines, "all others are left out"
    return {line[1:] for line in lines if line.startswith("!")}
