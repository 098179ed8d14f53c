"""The classes for threads, made of those for asyncio: TimerClient and FakeCluster.

`python -m tests.thread_classes` writes them; `--check` exits 1 if one is not current.

    async def cancel(...)      def cancel(...): runs the same call on the clients' loop
    async generator            its pages are read one by one
    def client(...)            the same text, with the names of the classes for threads
    property                   that of the object for asyncio

Signatures and docstrings are the same. A method that the base class defines is written by hand.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
Function = ast.FunctionDef | ast.AsyncFunctionDef
NAMES = {
    "AsyncTimerClient": "TimerClient",
    "AsyncConsumer": "Consumer",
    "AsyncFakeCluster": "FakeCluster",
}
SUBMITTED = {
    "schedule": ("submit", "request_id is None and not self._client.is_new"),
    "schedule_batch": ("submit_batch", "request_id is None"),
}
"""Methods that are submitted under a condition. A submission needs no task on the loop. A thread
that must not wait gets its error before anything is sent."""
PAGES = {"list_timers": "list_page"}
"""Async generators, and the methods that return a page and the token of the next one."""

HELPERS = {
    "Iterator": "collections.abc",
    "at_hand": "timerclient.rows.rows",
    "check_wait": "timerclient.threads.background",
    "times_at_hand": "timerclient.rows.rows",
}
"""Names in the bodies of methods, and their modules."""


@dataclass(frozen=True)
class ThreadClass:
    """A class for threads that is made of another class."""

    module: str
    opening: str
    """First line of its docstring."""
    source: tuple[str, str]
    """Module and name of the class for asyncio."""
    base: tuple[str, str]
    """Module and name of the base class, which is written by hand."""
    wrapped: str
    """The attribute of the base class that holds the object for asyncio."""
    without: frozenset[str]
    """Methods that are not for the application."""

    @property
    def path(self) -> Path:
        """The file of the class."""
        return file_of(self.module)


CLASSES = (
    ThreadClass(
        module="timerclient.client.timer_client",
        opening="A client of a cluster, for threads.",
        source=("timerclient.client.aio", "AsyncTimerClient"),
        base=("timerclient.client.sync", "ThreadClient"),
        wrapped="_client",
        without=frozenset({"close_with", "is_new", "list_page", "nodes", "producer", "within_s"}),
    ),
    ThreadClass(
        module="timerfake.thread_cluster",
        opening="An in-memory cluster, on the thread that all clients of the process share.",
        source=("timerfake.cluster", "AsyncFakeCluster"),
        base=("timerfake.cluster", "ThreadCluster"),
        wrapped="_cluster",
        without=frozenset({"quiet", "start"}),
    ),
)


def file_of(module: str) -> Path:
    """Return the file of a module."""
    return ROOT / (module.replace(".", "/") + ".py")


def imports_of(module: str) -> dict[str, str]:
    """Return the names that a module imports or defines, each with its import elsewhere."""
    found = {}
    for node in ast.parse(file_of(module).read_text()).body:
        own: list[str] = []
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                found[one.asname or one.name] = f"from {node.module} import {ast.unparse(one)}"
        elif isinstance(node, ast.Import):
            found |= {one.name: f"import {one.name}" for one in node.names}
        elif isinstance(node, ast.ClassDef | Function):
            own = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own = [one.id for one in targets if isinstance(one, ast.Name)]
        found |= {name: f"from {module} import {name}" for name in own}
    return found


def class_in(module: str, name: str) -> ast.ClassDef:
    """Return a class of a module."""
    [found] = [
        node
        for node in ast.parse(file_of(module).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return found


def ancestry(module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield a class and those that it inherits from, each with its module."""
    while True:
        node = class_in(module, name)
        yield module, node
        if not node.bases:
            return
        [base] = node.bases
        _, module, _, name = imports_of(module)[ast.unparse(base)].split()


def functions(node: ast.ClassDef) -> list[Function]:
    """Return the functions of a class."""
    return [each for each in node.body if isinstance(each, Function)]


class Renamed(ast.NodeTransformer):
    """Puts the names of classes for threads in place of those for asyncio."""

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = NAMES.get(node.id, node.id)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if not isinstance(node.value, str):
            return node
        text = node.value
        for name, other in NAMES.items():
            text = text.replace(name, other)
        return ast.Constant(text)


def arguments(of: Function, *, without: tuple[str, ...] = (), lists: bool) -> str:
    """Return the arguments of a call of `of` by a function with the same parameters.

    `lists`: iterators of the caller are read first, so that none runs on the loop's thread.
    """

    def value(each: ast.arg) -> str:
        lazy = lists and each.annotation is not None and "Iterable[" in ast.unparse(each.annotation)
        return f"at_hand({each.arg})" if lazy else each.arg

    parts = [value(each) for each in of.args.args[1:] if each.arg not in without]
    parts += [f"{each.arg}={value(each)}" for each in of.args.kwonlyargs if each.arg not in without]
    if (more := of.args.kwarg) is not None:
        assert more.annotation is not None
        many = lists and "WhenMany" in ast.unparse(more.annotation)
        parts.append(f"**times_at_hand({more.arg})" if many else f"**{more.arg}")
    return ", ".join(parts)


def body_of(of: Function, wrapped: str) -> list[ast.stmt]:
    """Return the body of the method for threads, without its docstring."""
    wrapped = f"self.{wrapped}"
    if isinstance(of, ast.FunctionDef):
        if of.decorator_list:
            return ast.parse(f"return {wrapped}.{of.name}").body
        return of.body[1:]
    if of.name in PAGES:
        given = arguments(of, lists=False).replace(", ", ", token, ", 1)
        page = f"lambda token: {wrapped}.{PAGES[of.name]}({given})"
        return ast.parse(f"return self._each({page})").body
    text = ""
    if of.name in SUBMITTED:
        submit, condition = SUBMITTED[of.name]
        given = arguments(of, without=("request_id",), lists=False)
        text = f"if {condition}:\n check_wait()\n return self.{submit}({given}).result()\n"
    call = f"self._call({wrapped}.{of.name}({arguments(of, lists=True)}))"
    nothing = of.returns is not None and ast.unparse(of.returns) == "None"
    return ast.parse(text + (call if nothing else f"return {call}")).body


def method(of: Function, wrapped: str) -> ast.FunctionDef:
    """Return the method for threads that runs `of`."""
    returns = of.returns
    if isinstance(returns, ast.Constant) and isinstance(returns.value, str):
        returns = ast.parse(returns.value, mode="eval").body
    if of.name in PAGES:
        assert isinstance(returns, ast.Subscript)
        returns = ast.Subscript(ast.Name("Iterator"), returns.slice)
    made = ast.parse("def made(): pass").body[0]  # Python's versions differ in the fields of a node
    assert isinstance(made, ast.FunctionDef)
    made.name, made.args, made.returns = of.name, of.args, returns
    made.decorator_list, made.body = of.decorator_list, [of.body[0], *body_of(of, wrapped)]
    Renamed().visit(made)
    return made


def class_of(made: ThreadClass) -> ast.ClassDef:
    """Return a class for threads."""
    _, source = made.source
    own, *bases = [node for _, node in ancestry(*made.source)]
    by_hand = {each.name for each in functions(class_in(*made.base))} | made.without
    _, _, more = (ast.get_docstring(own, clean=False) or "").partition("\n")
    init = next(each for each in functions(own) if each.name == "__init__")
    init.body = ast.parse(f"super().__init__({source}({arguments(init, lists=False)}))").body
    methods = [
        method(each, made.wrapped)
        for node in [own, *reversed(bases)]
        for each in functions(node)
        if not each.name.startswith("_") and each.name not in by_hand
    ]
    kind = ast.parse(f"class {NAMES[source]}({made.base[1]}): pass").body[0]
    assert isinstance(kind, ast.ClassDef)
    kind.body = [ast.Expr(ast.Constant(f"{made.opening}\n{more}")), init, *methods]
    return kind


def text_of(made: ThreadClass) -> str:
    """Return the text of a module with a class for threads."""
    node = ast.fix_missing_locations(class_of(made))
    known = {each: f"from {module} import {each}" for each, module in HELPERS.items()}
    known |= {
        NAMES[one.source[1]]: f"from {one.module} import {NAMES[one.source[1]]}" for one in CLASSES
    }
    for module in [made.base[0], *(module for module, _ in ancestry(*made.source))]:
        known |= imports_of(module)
    used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - {node.name}
    lines = [
        f'"""{node.name}: made of {made.source[1]} by `make fmt`, not written by hand."""',
        "# ruff: noqa: B008, PLR0913 -- as in its source",
        *(known[each] for each in sorted(used & known.keys())),
        ast.unparse(node),
    ]
    return formatted("\n".join(lines), made.path)


def formatted(text: str, path: Path) -> str:
    """Return a text as `make fmt` mends and formats it."""
    for command in (["check", "--quiet", "--fix-only"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(path), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main() -> None:
    """Write the classes, or check them."""
    for made in CLASSES:
        text = text_of(made)
        if "--check" not in sys.argv:
            made.path.write_text(text)
        elif not made.path.exists() or made.path.read_text() != text:
            sys.exit(f"{made.path.relative_to(ROOT)} is not current: make fmt")


if __name__ == "__main__":
    main()
