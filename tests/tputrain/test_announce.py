"""What is said to people: lines on the terminal, by way of `logging`."""

import logging

import pytest

from tputrain.announce import LOGGER, announced, say


@pytest.fixture
def records():
    """What a handler of the user's own gets."""
    kept: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    handler, level = Keeping(), LOGGER.level
    LOGGER.addHandler(handler)
    yield kept
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(level)


def test_lines_are_printed_as_they_are_and_go_to_other_handlers_too(capsys, records):
    say("100 % of it, %s")
    with announced("building"):
        pass
    assert capsys.readouterr().out == "100 % of it, %s\nbuilding ...\nbuilding ... 0.0 s\n"
    assert records == ["100 % of it, %s", "building ...", "building ... 0.0 s"]


def test_a_level_above_info_silences_all_of_it(capsys, records):
    logging.getLogger("tputrain").setLevel(logging.WARNING)
    say("nothing")
    with announced("building"):
        pass
    assert capsys.readouterr().out == ""
    assert records == []
