"""Ctrl-C where JAX catches everything: it is raised all the same."""

import signal
import threading

import pytest
import torch

from tpu_backend.interrupts import keeps_interrupts


def swallows(raised: list[BaseException]) -> str:
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException as error:
        raised.append(error)
    return "went on"


def test_an_interrupt_that_is_swallowed_is_raised_behind_the_function():
    raised = []
    with pytest.raises(KeyboardInterrupt) as caught:
        keeps_interrupts(swallows)(raised)
    assert caught.value is raised[0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_that_an_interrupt_led_to_is_told_as_the_interrupt():
    def fails() -> None:
        swallows([])
        raise ValueError("what was not there")

    with pytest.raises(KeyboardInterrupt) as caught:
        keeps_interrupts(fails)()
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_interrupt_while_the_handler_is_put_back_leaves_no_trace(monkeypatch):
    put, times = signal.signal, []

    def interrupted(number, handler):
        times.append(handler)
        if len(times) == 2:  # the first time it was installed
            signal.raise_signal(signal.SIGINT)
        return put(number, handler)

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keeps_interrupts(lambda: 1)()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_errors_results_and_handlers_of_ones_own_are_as_they_were():
    came = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        assert keeps_interrupts(swallows)([]) == "went on"
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [signal.SIGINT]
    with pytest.raises(ValueError, match="as it is"):
        keeps_interrupts(lambda: exec("raise ValueError('as it is')"))()
    assert keeps_interrupts(lambda x, y: x + y)(1, y=2) == 3


def test_a_thread_that_is_not_the_main_one_leaves_the_handler_alone():
    found = []
    function = keeps_interrupts(lambda: found.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_ctrl_c_in_a_place_of_jax_that_catches_everything_ends_the_script(monkeypatch):
    from jax._src.lax import lax

    torch.ones(2).to("tpu")
    broadcast, raised = lax._broadcast_shapes_uncached, []

    def interrupted(*shapes):
        if not raised:
            raised.append(True)
            signal.raise_signal(signal.SIGINT)
        return broadcast(*shapes)

    monkeypatch.setattr(lax, "_broadcast_shapes_uncached", interrupted)
    x = torch.arange(611.0).to("tpu")
    with pytest.raises(KeyboardInterrupt):
        (x[:, None].sin() * x.cos()).sum().item()
    assert raised
    expected = torch.arange(611.0)
    torch.testing.assert_close((x[:, None].sin() * x.cos()).cpu(), expected[:, None].sin() * expected.cos())
