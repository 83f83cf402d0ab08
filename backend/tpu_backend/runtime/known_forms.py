"""What tracing said of each form of an op (`trace_form` in segment.py), kept beside the programs.

A new process records the same forms again, and would trace each of them before it can look its program up.
"""

from __future__ import annotations

import atexit
import time

from tpu_backend import executable_cache
from tpu_backend.executable_cache import ExecutableCache
from tpu_backend.lowering.answers import Answer
from tpu_backend.runtime.program_key import key_of_forms, settled_by_version
from tpu_backend.runtime.signature import Summary

_PAUSE = 2.0  # seconds at least between two writes: the file is written whole, and grows


class _KnownForms:
    """Those of one cache, by the digests of their signatures."""

    def __init__(self, cache: ExecutableCache):
        self.cache, self.key = cache, key_of_forms()
        self.answers: dict[str, Answer] = self._read()
        self.has_news = False
        self.written_at = float("-inf")

    def _read(self) -> dict[str, Answer]:
        found = self.cache.read(self.key)
        return {} if found is None else {form: Answer(*said) for form, said in found[0]["forms"].items()}

    def write(self) -> None:
        self.has_news = False  # first: what is learnt meanwhile is news for the next time
        self.written_at = time.monotonic()
        for form, answer in self._read().items():  # another process may have learnt others
            self.answers.setdefault(form, answer)
        self.cache.write(self.key, {"forms": dict(self.answers)}, b"")


_known: _KnownForms | None = None


def _current() -> _KnownForms | None:
    global _known
    cache = executable_cache.current()
    if cache is None:
        return None
    if _known is None or _known.cache is not cache:
        _known = _KnownForms(cache)
    return _known


def recall(form: Summary) -> Answer | None:
    """What an earlier process found out about a form, if there is an executable cache and one did."""
    if not settled_by_version(form.name) or (known := _current()) is None:
        return None
    return known.answers.get(form.digest)


def learn(form: Summary, answer: Answer) -> None:
    """A form was traced."""
    if settled_by_version(form.name) and (known := _current()) is not None:
        known.answers[form.digest] = answer
        known.has_news = True


def keep(in_any_case: bool = False) -> None:
    """Write down what is new: to be called now and then, as when a program is written."""
    if _known is None or not _known.has_news or _known.cache is not executable_cache.current():
        return
    if in_any_case or time.monotonic() - _known.written_at > _PAUSE:
        _known.write()


atexit.register(keep, in_any_case=True)
