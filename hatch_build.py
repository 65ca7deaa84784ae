"""Build hook: the package's URLs are those of the repository that it is built from.

A fork's package names the fork. Without a repository that others can reach, it names none.
"""

import os
import re
import subprocess
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hatchling.metadata.plugin.interface import MetadataHookInterface

_SHORT_SSH = re.compile(r"(?:[^@/]+@)?(?P<host>[\w.-]+\.[a-z]+):(?P<path>[^/].*)")  # git@host.org:a/b


class CustomMetadataHook(MetadataHookInterface):
    """Fills in `project.urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets `urls`, from an sdist's own metadata where this is one."""
        root = Path(self.root)
        packed = root / "PKG-INFO"
        metadata["urls"] = _packed_urls(packed) if packed.exists() else project_urls(_home(root))


def project_urls(remote: str) -> dict[str, str]:
    """Makes the URLs from the address of a git remote; none from a folder's or a machine's name.

    A user, a password and a port of the address are left out.
    """
    short = _SHORT_SSH.fullmatch(remote)
    parts = urlsplit(f"ssh://{short['host']}/{short['path']}" if short else remote)
    path = parts.path.strip("/").removesuffix(".git")
    if parts.scheme not in ("https", "ssh") or "." not in (parts.hostname or "") or not path:
        return {}
    home = f"https://{parts.hostname}/{path}"
    return {
        "Repository": home,
        "Documentation": f"{home}/tree/HEAD/docs",
        "Changelog": f"{home}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


def _home(root: Path) -> str:
    """Returns the address of the repository: GitHub's word in a workflow, else the remote `origin`."""
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
    if not (root / ".git").exists():
        return ""
    try:
        asked = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # no git on this machine
        return ""


def _packed_urls(packed: Path) -> dict[str, str]:
    lines = HeaderParser().parsestr(packed.read_text(encoding="utf-8")).get_all("Project-URL", [])
    return dict(line.split(", ", 1) for line in lines)
