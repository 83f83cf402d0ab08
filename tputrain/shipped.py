"""The recipes and configuration pieces that come with tputrain."""

from importlib.resources import files
from pathlib import Path

from tputrain.config_checks import did_you_mean, nearest
from tputrain.errors import UserError


def shipped_directory(kind: str) -> Path:
    """The directory of shipped `recipes` or `configs`: in the package, or in the source checkout."""
    package = Path(str(files("tputrain")))
    installed = package / "shipped" / kind
    return installed if installed.is_dir() else package.parent / kind


def shipped_names(kind: str) -> list[str]:
    """Names of what is shipped, such as `llama` (recipes) or `model/llama-5m` (configs), sorted."""
    directory = shipped_directory(kind)
    return sorted(
        path.relative_to(directory).with_suffix("").as_posix() for path in directory.rglob("*.yaml")
    )


def shipped_path(kind: str, name: str) -> Path | None:
    """The file of that name, or None."""
    return shipped_directory(kind) / f"{name}.yaml" if name in shipped_names(kind) else None


def find_recipe(name: str, expected: str = "file") -> Path:
    """The recipe file that `name` means: a path, or the name of a shipped one; UserError if neither."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_path("recipes", name)
    if shipped is not None:
        return shipped
    known = shipped_names("recipes")
    if path.is_dir():
        raise UserError(
            f"{name}: a directory; expected a recipe (`tputrain resume {name}` goes on with a run)"
        )
    hint = did_you_mean(nearest(path.stem, known))
    raise UserError(
        f"{name}: no such {expected}, and no shipped recipe (there are: {', '.join(known)}){hint}"
    )


def default_run_dir(recipe: Path) -> Path:
    """Where the run of the recipe file `recipe` is, unless it says so itself."""
    return Path("runs") / recipe.stem
