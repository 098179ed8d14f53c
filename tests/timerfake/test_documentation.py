"""The examples of the documentation are a test file, and pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/testing.md").read_text(), re.DOTALL)
SETTINGS = ["asyncio_mode=auto", "asyncio_default_fixture_loop_scope=function"]


def test_examples_of_the_documentation_pass(tmp_path: Path) -> None:
    source = "\n\n".join(EXAMPLES)
    (tmp_path / "test_examples.py").write_text(source)
    (tmp_path / "pytest.ini").write_text(
        "\n".join(["[pytest]", *SETTINGS, "filterwarnings = error"])
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    tests = len(re.findall(r"^(?:async )?def test_", source, re.MULTILINE))
    assert tests >= 9
    assert f"{tests} passed" in run.stdout, run.stdout + run.stderr
