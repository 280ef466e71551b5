"""Raddle's version: the only place that says it. CMakeLists.txt runs this file; pyproject.toml imports it.

The tag of the commit that is checked out (v0.1.0) is the version. Another commit is on the way to `NEXT`. What has no
git is a source distribution, which knows its version from PKG-INFO, or else an archive of `NEXT`.
"""

import re
import subprocess
from pathlib import Path

NEXT = "0.1.0"

ROOT = Path(__file__).resolve().parents[1]


def version(root: Path = ROOT) -> str:
    """The version of the sources in that folder."""
    info = root / "PKG-INFO"
    if info.exists():
        return re.search(r"^Version: (\S+)$", info.read_text(encoding="utf-8"), re.MULTILINE).group(1)
    if not (root / ".git").exists():
        return NEXT
    command = ["git", "-C", str(root), "tag", "--points-at", "HEAD"]
    try:
        tags = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return NEXT
    released = re.findall(r"^v(\d+\.\d+\.\d+)$", tags, re.MULTILINE)
    return released[-1] if released else f"{NEXT}.dev0"


def dynamic_metadata(field, settings, project=None):
    """What scikit-build-core calls."""
    if field != "version":
        raise ValueError(f"{field} is asked for; expected version")
    return version()


if __name__ == "__main__":
    print(version())
