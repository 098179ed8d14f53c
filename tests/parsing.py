"""Syntax trees of the project's own files, for the tests that read them."""

import ast
import gc
from collections.abc import Iterator


def parsed(source: str) -> ast.Module:
    """Return the tree of a module's text.

    Python before 3.11.8 raises SystemError if the garbage collector runs in the middle and another
    thread parses then, as it does for each traceback that it prints (python/cpython#106905).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()


def statements(parent: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node, and what is between them, but no expressions."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(parent, name, ()):
            yield child
            yield from statements(child)
