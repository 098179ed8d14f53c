"""The files of the product."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


@cache
def product() -> list[Path]:
    """Return the Python files of the product and of its proof, without tests and generated code."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [
        ROOT / name
        for name in listed.stdout.split()
        if "_pb2" not in name and not name.startswith("tests/") and (ROOT / name).exists()
    ]
