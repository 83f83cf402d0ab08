"""Questions from docstrings: who is asked about, what is answered, and that it is made once."""

import json

from tputrain.data.docstrings import docstring_conversations, questions_of

SOURCE = '''
"""Tools for boats.

More about them.
"""

def float_it(boat, *, slowly=False):
    """Put a boat
    into the water."""

def _hidden():
    """Nobody is to ask about this."""

def silent(): pass

class Boat:
    """What swims on top of water."""

    def sink(self, depth):
        """Go down; the opposite of floating."""

    def nap(self):
        """Zz."""
'''


def test_everything_public_with_a_docstring_is_asked_about_and_answered_by_its_first_paragraph():
    assert list(questions_of("sea/boats.py", SOURCE)) == [
        ("What is the module sea.boats for?", "Tools for boats."),
        ("What does sea.boats.float_it(boat) do?", "Put a boat into the water."),
        ("What is the class sea.boats.Boat for?", "What swims on top of water."),
        ("What does sea.boats.Boat.sink(depth) do?", "Go down; the opposite of floating."),
    ]


def test_packages_have_their_own_name_and_what_is_private_or_no_python_is_left_out():
    assert [question for question, _ in questions_of("sea/__init__.py", '"""All about the sea."""')] == [
        "What is the module sea for?"
    ]
    assert list(questions_of("_sea.py", SOURCE)) == []
    assert list(questions_of("sea.py", "def broken(:")) == []


def test_it_is_made_once_for_a_source(tmp_path, capsys):
    first = docstring_conversations([("boats.py", SOURCE)], "digest", str(tmp_path))
    assert json.loads(first[0]) == [
        {"role": "user", "content": "What is the module boats for?"},
        {"role": "assistant", "content": "Tools for boats."},
    ]
    assert "reading docstrings, once" in capsys.readouterr().out
    assert docstring_conversations([], "digest", str(tmp_path)) == first
    assert capsys.readouterr().out == ""
    (tmp_path / "docstrings-digest.json").write_text("[")
    assert docstring_conversations([("boats.py", SOURCE)], "digest", str(tmp_path)) == first
