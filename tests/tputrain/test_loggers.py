"""Numbers on disk and on the screen."""

import contextlib
import errno
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tputrain.announce import announced, say
from tputrain.callbacks.best_checkpoint import BestCheckpoint
from tputrain.callbacks.callback import Callback, load_state_of, state_of
from tputrain.errors import UserError
from tputrain.loggers.console import BarLogger, PlainLogger, console_logger
from tputrain.loggers.jsonl import JsonlLogger, read_jsonl

STEP = {
    "step": 10,
    "loss": 2.5,
    "learning_rate": 0.001,
    "grad_norm": 1.25,
    "tokens": 1000,
    "tokens_per_second": 1234.5,
    "step_seconds": 0.5,
    "data_wait": 0.015,
}


def write(directory, steps, resumed, step=0):
    logger = JsonlLogger(directory)
    logger.start(step, 10, resumed)
    logger.log([{"step": number, "loss": 0.5} for number in steps])
    logger.sync()
    logger.close()


def steps_in(directory):
    return [record["step"] for record in read_jsonl(directory / "metrics.jsonl")]


def test_going_on_from_a_step_forgets_what_came_after_it_and_a_line_cut_off_by_a_kill(tmp_path):
    write(tmp_path, [1, 2, 3, 4], resumed=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    write(tmp_path, [3, 4, 5], resumed=True, step=2)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


def test_a_run_that_begins_forgets_everything(tmp_path):
    write(tmp_path, [0, 1], resumed=False)
    write(tmp_path, [1], resumed=False)
    assert steps_in(tmp_path) == [1]


def full(monkeypatch):
    """Have the disk take ten bytes more, and then none."""
    write_some = os.write
    room = 10

    def write(descriptor, data):
        nonlocal room
        if descriptor == 2:
            return write_some(descriptor, data)
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write_some(descriptor, data[:room])
        room -= taken
        return taken

    monkeypatch.setattr(os, "write", write)


def test_lines_that_a_full_disk_refuses_are_written_when_there_is_room(tmp_path, monkeypatch, capfd):
    logger = JsonlLogger(tmp_path)
    logger.start(0, 10, False)
    with monkeypatch.context() as patched:
        full(patched)
        for step in (1, 2, 3):
            logger.log([{"step": step, "loss": 0.5}])
            logger.sync()
        assert capfd.readouterr().err.count("cannot be written (No space left on device)") == 1
        assert steps_in(tmp_path) == []
    logger.log([{"step": 4, "loss": 0.5}])
    logger.close()
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    assert "metrics.jsonl can be written again" in capfd.readouterr().err


def test_after_a_sync_that_failed_nothing_is_promised(tmp_path, monkeypatch, capfd):
    logger = JsonlLogger(tmp_path)
    logger.start(0, 10, False)
    with monkeypatch.context() as patched:

        def fails(descriptor: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patched.setattr(os, "fsync", fails)
        logger.log([{"step": 1}])
        logger.sync()
    logger.log([{"step": 2}])
    logger.close()
    said = capfd.readouterr().err
    assert "metrics.jsonl can be written again, and what could not be synced may be missing in it" in said


def test_lines_that_were_never_written_are_counted_at_the_end(tmp_path, monkeypatch, capfd):
    logger = JsonlLogger(tmp_path)
    logger.start(0, 10, False)
    full(monkeypatch)
    logger.log([{"step": step} for step in (1, 2, 3)])
    logger.close()
    assert "metrics.jsonl: its last 3 lines could not be written and are lost" in capfd.readouterr().err


def test_logs_that_cannot_be_begun_are_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"its logs cannot be written \(Is a directory\); make room or"):
        JsonlLogger(tmp_path).start(0, 10, False)


def test_a_line_for_a_standard_output_on_a_full_disk_ends_no_run(monkeypatch):
    with Path("/dev/full").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        say("what")
        with announced("that"):
            pass
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            stream.close()


def test_what_others_write_meanwhile_stands_in_no_line_of_a_log(tmp_path, monkeypatch):
    with (tmp_path / "log").open("w+") as log:
        monkeypatch.setattr(sys, "stdout", log)
        with announced("that"):
            os.write(log.fileno(), b"a warning\n")
        with contextlib.suppress(KeyError), announced("this"):
            raise KeyError
        monkeypatch.undo()
        log.seek(0)
        beginning, *lines = log.read().splitlines()
    assert [beginning, lines[0]] == ["that ...", "a warning"]
    assert re.fullmatch(r"that \.\.\. \d\.\d s", lines[1])
    assert lines[2:] == ["this ...", "this ... not finished"]


def test_on_a_terminal_a_line_is_completed_unless_something_is_said_in_between(monkeypatch, capsys):
    monkeypatch.setattr("tputrain.announce._is_terminal", lambda: True)
    with announced("this"):
        pass
    with announced("that"):
        say("something")
        with announced("a part"):
            pass
    said = re.sub(r"\d\.\d", "0.1", capsys.readouterr().out)
    assert said.splitlines() == [
        "this ... 0.1 s",
        "that ... ",
        "something",
        "a part ... 0.1 s",
        "that ... 0.1 s",
    ]


def test_a_logger_that_was_never_started_writes_nothing(tmp_path):
    logger = JsonlLogger(tmp_path)
    logger.log([{"step": 1}])
    logger.log_evaluation({"step": 1})
    logger.sync()
    logger.close()
    assert not list(tmp_path.iterdir())


def test_plain_lines(capsys):
    logger = PlainLogger()
    logger.start(0, 20, resumed=False)
    logger.log([STEP])
    logger.log_evaluation({"step": 10, "loss_hex": "0x1", "loss": 2.0, "bits_per_byte": 1.5, "seconds": 3.0})
    assert capsys.readouterr().out.splitlines() == [
        "step 10/20  loss 2.5000  lr 1.00e-03  grad norm 1.25  1,234 tokens/s  0.500 s/step  data wait 2%",
        "evaluation at step 10: loss 2.0000, bits per byte 1.5000",
    ]


def test_a_long_silence_is_broken_without_reading_the_device(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tputrain.loggers.console.time.monotonic", lambda: now[0])
    logger = PlainLogger()
    logger.start(0, 20, resumed=False)
    for step in (1, 2, 3, 4):
        now[0] += 2.0
        logger.after_step(step)
    assert capsys.readouterr().out == "step 3/20\n"


def test_the_bar_is_for_terminals_and_can_be_chosen(capsys):
    assert isinstance(console_logger("auto"), PlainLogger)  # pytest's output is no terminal
    logger = console_logger("bar")
    assert isinstance(logger, BarLogger)
    logger.start(5, 20, resumed=True)
    logger.after_step(6)
    logger.log([STEP])
    logger.log_evaluation({"step": 10, "loss": 2.0})
    logger.close()
    logger.close()
    out = capsys.readouterr().out
    assert "10/20" in out
    assert "evaluation at step 10: loss 2.0000" in out


@pytest.mark.parametrize(("given", "left"), [([], ["Counter"]), (["Counter"], []), (["Other"], ["Counter"])])
def test_a_callback_state_that_nobody_wants_is_named(given, left):
    class Counter(Callback):
        def load_state_dict(self, state):
            self.loaded = state

    class Other(Counter):
        pass

    kinds = {"Counter": Counter, "Other": Other}
    callbacks = [kinds[name]() for name in given]
    assert load_state_of(callbacks, [{"kind": "Counter", "state": {"count": 3}}]) == left
    if not left:
        assert callbacks[0].loaded == {"count": 3}


def test_callback_states_find_their_callback_in_any_order():
    first, second = BestCheckpoint("loss"), BestCheckpoint("accuracy", mode="max")
    first.load_state_dict({"metric": "loss", "mode": "min", "improvements": [[3, 0.5]]})
    second.load_state_dict({"metric": "accuracy", "mode": "max", "improvements": [[6, 0.9]]})
    saved = state_of([first, second])
    again = [BestCheckpoint("accuracy", mode="max"), BestCheckpoint("loss")]
    assert load_state_of(again, saved) == []
    assert [each.step for each in again] == [6, 3]
