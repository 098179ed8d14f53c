"""Records of calls, for tests that count them."""

from typing import Any

import pytest


def calls_of(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """Return the arguments of each call of a function from now on. The function works as before.

    `owner`: its class, object or module. A method of a class has `self` as its first argument.
    """
    calls, real = list[tuple[Any, ...]](), getattr(owner, name)

    def noted(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return real(*args, **more)

    patch.setattr(owner, name, noted)
    return calls
