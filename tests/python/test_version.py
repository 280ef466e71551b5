import runpy
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import raddle

ROOT = Path(__file__).parents[2]


def test_library_and_package_agree():
    assert raddle.__version__ == version("raddle")


@pytest.fixture
def version_of():
    """What cmake/version.py says of sources in a folder."""
    return runpy.run_path(str(ROOT / "cmake/version.py"))


def git(folder, *words):
    identity = ["-c", "user.name=Raddle", "-c", "user.email=raddle@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def test_the_version_is_the_tag_of_the_commit(version_of, tmp_path):
    version = version_of["version"]
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    assert version(tmp_path) == version_of["NEXT"] + ".dev0"
    git(tmp_path, "tag", "v7.1.2")
    git(tmp_path, "tag", "another-v8")
    assert version(tmp_path) == "7.1.2"
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "two")
    assert version(tmp_path) == version_of["NEXT"] + ".dev0"


def test_the_version_where_there_is_no_git(version_of, tmp_path):
    assert version_of["version"](tmp_path) == version_of["NEXT"]
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: raddle\nVersion: 3.2.1\n\nVersion: 9\n")
    assert version_of["version"](tmp_path) == "3.2.1"
