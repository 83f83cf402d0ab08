"""Questions and answers for who has none at hand: made from the docstrings of Python's standard library."""

import ast
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from tputrain.announce import announced, say
from tputrain.data.built_once import built_once
from tputrain.data.rows import conversation

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_FORMAT = 1  # raise when what is kept, or how it is made, changes
_SHORTEST_ANSWER = 15  # characters: less says nothing


def docstring_conversations(sources: Iterable[tuple[str, str]], digest: str, cache_dir: str) -> list[str]:
    """A conversation (JSON) for each public module, class and function that says what it is for.

    `sources`: (path, text) of Python files, paths relative with forward slashes; `digest` names them all. The
    answer is the docstring's first paragraph. Reading all that source takes seconds, so the result is kept in
    `cache_dir`.
    """
    path = Path(cache_dir).expanduser() / f"docstrings-{_FORMAT}-{digest}.json"
    if (kept := _kept(path)) is not None:
        return kept

    def build(built: Path) -> None:
        with announced("questions: reading docstrings, once"):
            made = [
                conversation(question, answer)
                for name, text in sources
                for question, answer in questions_of(name, text)
            ]
        built.write_text(json.dumps(made), encoding="utf-8")

    built_once(path, "questions", say, cache_dir, build, lambda path: _kept(path) is not None)
    return json.loads(path.read_text(encoding="utf-8"))


def _kept(path: Path) -> list[str] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # not made yet, or damaged


def questions_of(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Question and answer for everything public in the source `text` of the module at `path`."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if any(part.startswith("_") for part in module.split(".")):
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # of old escapes in somebody else's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return  # templates and the like
    yield from _answered(f"What is the module {module} for?", tree)
    yield from _questions_below(module, tree)


def _questions_below(name: str, node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, str]]:
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _answered(f"What is the class {name}.{child.name} for?", child)
            yield from _questions_below(f"{name}.{child.name}", child)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            names = [argument.arg for argument in child.args.args if argument.arg not in ("self", "cls")]
            yield from _answered(f"What does {name}.{child.name}({', '.join(names)}) do?", child)


def _answered(question: str, node: Definition) -> Iterator[tuple[str, str]]:
    said = ast.get_docstring(node)
    answer = " ".join((said or "").strip().split("\n\n")[0].split())
    if len(answer) >= _SHORTEST_ANSWER:
        yield question, answer
