"""The examples of the documents."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def examples(document: str) -> list[str]:
    """Return the examples in Python of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
