"""`tputrain cp`: a shipped recipe as a file of the user's own."""

from pathlib import Path

from tputrain.announce import say
from tputrain.config_checks import did_you_mean, nearest
from tputrain.errors import UserError
from tputrain.shipped import shipped_names, shipped_path


def copy_recipe(name: str, path: str | None) -> int:
    """Copy the shipped recipe `name` to `path`, which must not exist yet."""
    shipped = shipped_path("recipes", name.removesuffix(".yaml"))
    if shipped is None:
        known = shipped_names("recipes")
        hint = did_you_mean(nearest(name, known))
        raise UserError(f"{name}: no shipped recipe (there are: {', '.join(known)}){hint}")
    target = Path(path or ".")
    if target.is_dir():
        target = target / shipped.name
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(shipped.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{target}: there already; choose another name, nothing was overwritten") from None
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}); choose another place") from None
    say(f"{target}: a copy of the recipe {shipped.stem}; edit it, then:")
    say(f"  tputrain validate {target}")
    say(f"  tputrain run {target}")
    return 0
