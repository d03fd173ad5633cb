"""Origin of a result: version, commit and code, for the attributes of datasets."""

import functools
import hashlib
import json
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ATTRIBUTES = ".zattrs"  # file of a Zarr store that holds them
PACKAGE = Path(__file__).parents[1]
VIEWS = ("cli", "plots")  # rooms that only show numbers


def own_version() -> str:
    """Return the version of pipejax, "unknown" where its sources are not installed."""
    try:
        return version("pipejax")
    except PackageNotFoundError:
        return "unknown"


def provenance() -> dict[str, str]:
    """Return the attributes that are stored with a result."""
    return {
        "pipejax": own_version(),
        "jax": version("jax"),
        "numpy": version("numpy"),
        "commit": _commit(),
        "code": code_hash(),
    }


def is_dataset(path: Path) -> bool:
    """Return whether a folder is a Zarr store of pipejax, by its attributes."""
    try:
        attributes = json.loads((path / ATTRIBUTES).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(attributes, dict) and "pipejax" in attributes


def _commit() -> str:
    """Return the commit of the repository that tracks this file, or "unknown"."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return "unknown"
    changes = _git("status", "--porcelain", "--", ".")
    return (_git("rev-parse", "HEAD") or "unknown") + ("+changes" if changes else "")


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(PACKAGE), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def code_hash(folder: Path = PACKAGE) -> str:
    """Hash all modules in a folder that affect results: equal hashes give equal numbers."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if name.parts[0] not in VIEWS:
            digest.update(str(name).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
