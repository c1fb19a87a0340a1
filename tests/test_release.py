"""What is released: a wheel and a source distribution that install, import and run, and the facts beside them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import shardwright

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution and the wheel, built by setuptools as `python -m build` calls it."""
    folder = tmp_path_factory.mktemp("release")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    hooks = "from setuptools import build_meta; print(build_meta.build_sdist('dist'), build_meta.build_wheel('dist'))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", hooks], cwd=folder, check=True, capture_output=True)
    return folder / "dist"


def test_both_have_the_package_and_nothing_else(built):
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    package = ROOT / "src/shardwright"
    sources = [*package.rglob("*.py"), *(package / "report/visual/assets").iterdir()]
    files = {path.relative_to(ROOT / "src").as_posix() for path in sources}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert names == files | {"shardwright/py.typed"}
    assert f"Version: {shardwright.__version__}" in metadata and "Requires-Dist: torch==2.13.0" in metadata
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} | {f"src/{name}" for name in files} <= inside


def test_the_wheel_works_in_an_environment_of_its_own(built, tmp_path):
    """Installed without its dependencies, which are those of this environment, and away from the clone."""
    (wheel,) = built.glob("*.whl")
    home = tmp_path / "home"
    options = ["-q", "--no-deps", "--no-index", "--ignore-installed", "--prefix", str(home)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True, capture_output=True)
    (packages,) = home.rglob("site-packages")
    path = os.pathsep.join([str(packages), sysconfig.get_path("purelib")])
    environment = {**os.environ, "PYTHONPATH": path}
    check = (
        "import torch, shardwright as sw; "
        f"assert sw.__file__.startswith({str(home)!r}), sw.__file__; "
        "model, x = torch.nn.Linear(4, 4), torch.randn(4, 4); "
        "print(sw.verify(model, 'tp=2', example=x).passed)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"
    command = home / "bin" / "shardwright"
    done = subprocess.run([command, "--version"], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"shardwright {shardwright.__version__}"


def test_the_citation_and_the_changelog_name_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == shardwright.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert f"## [{shardwright.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_issue_templates_are_forms():
    templates = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    for path in templates:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= set(form), path
        assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in form["body"]), path
    assert len(templates) >= 4
