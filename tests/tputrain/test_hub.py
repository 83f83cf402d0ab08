"""Names on the Hugging Face hub: asked only for what can be one, and not for long without a network."""

import socket
import threading

import pytest
from huggingface_hub import constants

from tputrain.data.config import DataConfig, DataError
from tputrain.data.pretrained_tokenizer import find_tokenizer
from tputrain.data.rows import open_rows
from tputrain.errors import UserError
from tputrain.hub import asking_hub, is_path
from tputrain.models.huggingface import load_huggingface
from tputrain.reachable import why_unreachable


@pytest.fixture
def no_network(monkeypatch) -> list[tuple[str, int]]:
    """The network is asked, and refuses; the addresses that were asked for."""
    asked: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int], timeout: float) -> None:
        asked.append(address)
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr("tputrain.reachable.getproxies", dict)
    return asked


def dataset(name: str) -> DataConfig:
    return DataConfig(source="hub", name=name, text_column="text")


FIND = {
    "data.tokenizer": find_tokenizer,
    "model.path": load_huggingface,
    "data.name": lambda name: open_rows(dataset(name)),
}


@pytest.mark.parametrize("key", FIND)
def test_without_a_network_a_name_is_one_line_at_once_and_one_at_the_end(key, no_network, capsys):
    with pytest.raises(UserError, match=r"not-a-model") as caught:
        FIND[key]("not-a-model")
    assert no_network == [("hub.invalid", 443)]  # and not again and again
    assert not constants.HF_HUB_OFFLINE
    said = str(caught.value)
    assert said.startswith(f"{key}=")
    assert "hub.invalid cannot be reached: Name or service not known; it was not fetched before; " in said
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{key}=not-a-model")
    assert line.endswith("it is fetched from hub.invalid (without a network, name a directory)")


@pytest.mark.parametrize("key", FIND)
@pytest.mark.parametrize("name", ["./nothere", "../nothere", "/no/where", "~/nothere", "one/two/three"])
def test_what_looks_like_a_path_is_no_name_on_the_hub(key, name, no_network, capsys):
    with pytest.raises(UserError, match=r": no such directory"):
        FIND[key](name)
    assert no_network == []
    assert capsys.readouterr().out == ""


def test_what_was_fetched_before_is_used_without_a_network(no_network, capsys):
    with asking_hub("data.tokenizer=gpt2"):
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    assert "note: hub.invalid cannot be reached" in capsys.readouterr().out


def test_a_user_who_is_offline_is_not_asked_for_a_network(no_network, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"data\.tokenizer=not-a-model: no tokenizer there"):
        find_tokenizer("not-a-model")
    assert no_network == []
    assert capsys.readouterr().out == ""


def test_names_of_the_hub_are_no_paths():
    assert not any(is_path(name) for name in ("gpt2", "openai-community/gpt2", "a.b/c.d"))


def test_behind_a_proxy_it_is_the_proxy_that_must_answer(no_network, monkeypatch):
    monkeypatch.setattr("tputrain.reachable.getproxies", lambda: {"https": "http://proxy.invalid:3128"})
    assert why_unreachable("https://hub.invalid/models") == "Name or service not known"
    assert no_network == [("proxy.invalid", 3128)]


def test_a_server_that_listens_is_reached(monkeypatch):
    monkeypatch.setattr("tputrain.reachable.getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert why_unreachable(f"http://127.0.0.1:{server.getsockname()[1]}") is None


def test_a_name_whose_look_up_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr("tputrain.reachable.PATIENCE", 0.05)
    monkeypatch.setattr("tputrain.reachable.getproxies", dict)
    ends = threading.Event()

    def never(address: tuple[str, int], timeout: float) -> None:
        ends.wait(20)
        raise OSError("too late")

    monkeypatch.setattr(socket, "create_connection", never)
    assert why_unreachable("http://hub.invalid") == "no answer within 0 s"
    ends.set()
