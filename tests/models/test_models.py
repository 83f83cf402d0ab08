"""The list of models under pytest: a few of different kinds every day, all of them with `-m sweep`."""

import pytest

from tests.models.table import ENTRIES, Entry
from tests.models.timm_import import INSTALL, TimmNotInstalledError, import_timm

EVERYDAY = {"Llama", "Mixtral", "Bert", "convolutional net", "graph net"}


def _parameters() -> list:
    return [
        pytest.param(entry, id=entry.name, marks=[] if entry.name in EVERYDAY else [pytest.mark.sweep])
        for entry in ENTRIES
    ]


def test_names_are_unique() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)
    assert set(names) >= EVERYDAY


@pytest.mark.parametrize("entry", _parameters())
def test_a_model_trains_as_on_the_cpu(entry: Entry) -> None:
    if entry.family == "timm":
        try:
            import_timm()
        except TimmNotInstalledError:
            pytest.skip(f"timm is no dependency, since it brings torchvision: {INSTALL}")
    assert entry.row().problems == ()
