"""The rooms of the house: packages import each other one way, and one module alone touches the device."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "tputrain"
TOUCH_THE_DEVICE = {"tputrain.device", "tputrain.cli.doctor"}


def imported(source: str) -> Iterator[str]:
    """What `source` imports, also inside functions, but not for type checkers alone.

    Of `from a import b` both `a` and `a.b`, as `b` may be a module.
    """
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        nodes += ast.iter_child_nodes(node)


def modules(package: Path) -> dict[str, str]:
    """Every module's source by its dotted name; a package's own is `__init__`."""
    paths = package.rglob("*.py")
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path.read_text() for path in paths
    }


def rooms(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which rooms each room imports: a package below the top, or a module of the top."""

    def room(name: str) -> str | None:
        top, *below = name.split(".")
        if top != "tputrain":
            return None
        return f"tputrain.{below[0]}" if below and below[0] != "__init__" else "tputrain"

    known = {room(name) for name in sources}
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        own = room(name)
        found = {room(each) for each in imported(source)}
        # The top itself is imported before any of its modules, and names what is public by text.
        found -= {"tputrain"}
        graph.setdefault(str(own), set()).update(str(each) for each in found & known - {own})
    return graph


def test_rooms_do_not_import_each_other_in_a_circle():
    try:
        TopologicalSorter(rooms(modules(PACKAGE))).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")


def test_one_module_and_the_doctor_touch_the_device():
    sources = modules(PACKAGE)
    touching = {
        name
        for name, source in sources.items()
        if any(f"{each}.".startswith("tpu_backend.") for each in imported(source))
    }
    assert touching == TOUCH_THE_DEVICE


def test_a_circle_is_found_also_through_an_import_in_a_function():
    one = "def f():\n    from tputrain.b import x\n"
    two = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tputrain.a import y\n"
    graph = rooms({"tputrain.a.m": one, "tputrain.b.n": two})
    assert graph == {"tputrain.a": {"tputrain.b"}, "tputrain.b": set()}
    graph = rooms({"tputrain.a.m": one, "tputrain.b.n": "from tputrain import a"})
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()
