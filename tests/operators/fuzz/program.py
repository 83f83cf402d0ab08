"""A program: lines of Python over tensors on ``device``, made at random and run where one likes."""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from tests.operators.fuzz import undefined
from tests.operators.fuzz.calls import CALLS, Call
from tests.operators.fuzz.leaves import FLOATS, INTEGERS, leaf, random_dtype, random_shape, scalar

_MOST_ELEMENTS = 200
_MOST_LINES = 8
_TRIES = 60
_KEPT_ERRORS = 0.15  # of the lines that the CPU refuses: each ends its program


@dataclass(frozen=True)
class Line:
    text: str
    target: str  # the variable that it makes or writes
    rounds: bool = False
    is_leaf: bool = False


@dataclass
class Program:
    lines: list[Line] = field(default_factory=list)
    mode: str = "fused"

    def script(self) -> str:
        """Python that shows the results of both devices."""
        body = "\n".join(f"        {line.text}" for line in self.lines)
        names = ", ".join(dict.fromkeys(line.target for line in self.lines))
        return (
            "import torch\nimport torch.nn.functional as F\nfrom math import inf, nan\n\n"
            f'torch.tpu.eager_mode("{self.mode}")\n'
            f'for device in ("cpu", "tpu"):\n    try:\n{body}\n        print(device, {names})\n'
            "    except Exception as error:\n        print(device, type(error).__name__, error)\n"
        )


@dataclass
class Results:
    """What a run left: its variables, or the line that raised and its error."""

    variables: dict[str, Any]
    error: Exception | None = None
    at: int = -1


_CODE: dict[str, Any] = {}


def execute(text: str, variables: dict[str, Any]) -> None:
    if (code := _CODE.get(text)) is None:
        code = _CODE[text] = compile(text, "<program>", "exec")
        if len(_CODE) > 50_000:
            _CODE.clear()
    exec(code, variables)


def names_for(device: str) -> dict[str, Any]:
    return {"torch": torch, "F": F, "inf": math.inf, "nan": math.nan, "device": device}


def run(lines: Sequence[Line], device: str, noise: random.Random | None = None) -> Results:
    """``noise`` moves what rounds by its last digits, to learn what that makes of the results."""
    variables = names_for(device)
    for position, line in enumerate(lines):
        try:
            execute(line.text, variables)
        except Exception as error:
            return Results(_made(variables), error, position)
        if noise is not None and line.rounds:
            _shake(variables[line.target], noise)
    return Results(_made(variables))


def _made(variables: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in variables.items() if re.fullmatch(r"t\d+", name)}


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [found for item in value for found in tensors_in(item)] if isinstance(value, (tuple, list)) else []


def _shake(value: Any, noise: random.Random) -> None:
    for tensor in tensors_in(value):
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
            continue
        eps = torch.finfo(tensor.dtype).eps
        factors = [1 + eps * noise.choice((-2, -1, 0, 1, 2)) for _ in range(tensor.numel())]
        moved = tensor * torch.tensor(factors, dtype=torch.float64).reshape(tensor.shape).to(tensor.dtype)
        try:
            tensor.detach().copy_(moved)
        except RuntimeError:
            return  # expanded


# ---- making one


class _RefusedError(Exception):
    """There is no such tensor in this program."""


def generate(chance: random.Random, mode: str) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Writer(chance, mode).program()


class _Writer:
    """Writes a program line by line and runs each on the CPU, so that it knows what there is."""

    def __init__(self, chance: random.Random, mode: str):
        self._chance = chance
        self._program = Program(mode=mode)
        self._variables = names_for("cpu")
        self._inexact: set[int] = set()
        self._count = 0

    def program(self) -> Program:
        for _ in range(self._chance.randrange(1, 4)):
            self._leaf(random_shape(self._chance), random_dtype(self._chance))
        length = self._chance.randrange(1, _MOST_LINES + 1)
        made = 0
        for _ in range(_TRIES):
            outcome = self._add(self._chance.choice(CALLS))
            made += outcome == "made"
            if made == length or outcome == "ends":
                break
        return self._program

    # ---- what there is

    def _tensors(self, exact: bool) -> list[str]:
        return [
            name
            for name, value in self._variables.items()
            if isinstance(value, torch.Tensor) and not (exact and self._is_inexact(value))
        ]

    def _is_inexact(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._inexact

    def _new_name(self) -> str:
        self._count += 1
        return f"t{self._count - 1}"

    def _leaf(self, shape: Sequence[int], dtype: str) -> str:
        name = self._new_name()
        line = Line(f"{name} = {leaf(self._chance, tuple(shape), dtype)}", name, is_leaf=True)
        execute(line.text, self._variables)
        self._program.lines.append(line)
        return name

    def _pick(self, exact: bool, wanted: Any) -> str | None:
        found = [name for name in self._tensors(exact) if wanted(self._variables[name])]
        if not found:
            return None
        return found[-1] if self._chance.random() < 0.4 else self._chance.choice(found)

    # ---- a line

    def _add(self, call: Call) -> str:
        before, count = list(self._program.lines), self._count
        known = dict(self._variables)
        places = _Places(self, call)
        try:
            text = places.fill()
        except _RefusedError:
            self._program.lines, self._count, self._variables = before, count, known
            return "refused"
        inputs = [self._variables[name] for name in places.names]
        target = places.names[0] if call.writes and "out=" not in call.template else places.written
        if not call.writes:
            target = self._new_name()
            text = f"{target} = {text}"
        assert target is not None
        if undefined.before(text, inputs):
            self._restore(before, count)
            return "undefined"
        is_inexact = call.rounds or any(self._is_inexact(tensor) for tensor in inputs)
        line = Line(text, target, rounds=call.rounds)
        try:
            execute(text, self._variables)
            result = self._variables[target]
            too_large = any(tensor.numel() > _MOST_ELEMENTS for tensor in tensors_in(result))
            if too_large or undefined.after(text, inputs, result):
                self._restore(before, count)
                return "undefined"
        except Exception as error:
            if self._chance.random() < _KEPT_ERRORS and not undefined.error(text, error):
                self._program.lines.append(line)
                return "ends"
            self._restore(before, count)
            return "refused"
        for tensor in tensors_in(result):
            # Products and quotients of complex numbers round where those of real ones are exact.
            if is_inexact or (inputs and tensor.is_complex()):
                self._inexact.add(tensor.untyped_storage()._cdata)
        self._program.lines.append(line)
        return "made"

    def _restore(self, lines: list[Line], count: int) -> None:
        """Back to these lines: what the last one wrote on its way is gone."""
        self._program.lines, self._count = lines, count
        inexact = {
            name
            for name, value in self._variables.items()
            if isinstance(value, torch.Tensor) and self._is_inexact(value)
        }
        self._variables = names_for("cpu")
        for line in lines:
            execute(line.text, self._variables)
        self._inexact = {
            self._variables[name].untyped_storage()._cdata for name in inexact if name in self._variables
        }


class _Places:
    """Fills the places of one template."""

    def __init__(self, writer: _Writer, call: Call):
        self._writer, self._call, self._chance = writer, call, writer._chance
        self._bound: dict[str, str] = {}
        self._dim = 0
        self.names: list[str] = []
        self.written: str | None = None

    def fill(self) -> str:
        return re.sub(r"\{(\w+)\}", lambda match: self._fill(match.group(1)), self._call.template)

    def _fill(self, place: str) -> str:
        if place in ("s", "k", "t", "o"):
            return getattr(self, f"_{place}")()
        if place not in self._bound:
            self._bound[place] = getattr(self, f"_{place}")()
        return self._bound[place]

    def _first(self) -> torch.Tensor:
        if not self.names:
            raise _RefusedError
        return self._writer._variables[self.names[0]]

    def _tensor(self, wanted: Any, otherwise: Any = None) -> str:
        found = self._writer._pick(self._call.jumps, wanted)
        if found is None or (otherwise is not None and self._chance.random() < 0.15):
            if otherwise is None:
                otherwise = (random_shape(self._chance), random_dtype(self._chance))
            found = self._writer._leaf(*otherwise)
            if not wanted(self._writer._variables[found]):
                raise _RefusedError
        self.names.append(found)
        return found

    def _x(self) -> str:
        self.written = self._tensor(lambda tensor: True)
        return self.written

    def _f(self) -> str:
        dtype = self._chance.choice((*FLOATS, "float32"))
        return self._tensor(torch.is_floating_point, (random_shape(self._chance), dtype))

    def _n(self) -> str:
        dtype = self._chance.choice((*INTEGERS, "bool"))
        return self._tensor(
            lambda tensor: not tensor.is_floating_point() and not tensor.is_complex(),
            (random_shape(self._chance), dtype),
        )

    def _shaped(self, num_dims: int, shapes: Sequence[tuple[int, ...]], square: bool = False) -> str:
        return self._tensor(
            lambda tensor: tensor.dim() == num_dims and (not square or tensor.shape[0] == tensor.shape[1]),
            (self._chance.choice(shapes), self._chance.choice((random_dtype(self._chance), "float32"))),
        )

    def _sq(self) -> str:
        return self._shaped(2, [(3, 3)], square=True)

    def _mat(self) -> str:
        return self._shaped(2, [(2, 3), (3, 3)])

    def _vec(self) -> str:
        return self._shaped(1, [(3,), (4,)])

    def _y(self) -> str:
        if not self.names:
            return self._x()
        shape = self._first().shape
        cut = [1 if self._chance.random() < 0.2 else size for size in shape][self._chance.randrange(2) :]

        def fits(tensor: torch.Tensor) -> bool:
            try:
                torch.broadcast_shapes(tensor.shape, shape)
            except RuntimeError:
                return False
            return True

        return self._tensor(fits, (cut, random_dtype(self._chance)))

    def _v(self) -> str:
        first = self._first()
        dtype = str(first.dtype).removeprefix("torch.")
        dtype = (
            dtype
            if self._chance.random() < 0.8 and dtype in (*INTEGERS, *FLOATS)
            else random_dtype(self._chance)
        )
        return self._tensor(
            lambda tensor: (
                tensor.shape == first.shape and (tensor.dtype == first.dtype or tensor is not first)
            ),
            (first.shape, dtype),
        )

    def _o(self) -> str:
        if self._chance.random() < 0.5:
            return self._s()
        return self._y()

    def _m(self) -> str:
        shape = self._first().shape if self.names else random_shape(self._chance)
        return self._tensor(
            lambda tensor: tensor.dtype == torch.bool and tensor.shape == shape, (shape, "bool")
        )

    def _s(self) -> str:
        return scalar(self._chance)

    def _k(self) -> str:
        return str(self._chance.choice((0, 1, 2, 3, -1)))

    def _t(self) -> str:
        return f"torch.{random_dtype(self._chance)}"

    def _d(self) -> str:
        self._dim = self._random_dim()
        return str(self._dim)

    def _e(self) -> str:
        return str(self._random_dim())

    def _random_dim(self) -> int:
        dims = self._first().dim()
        return self._chance.randrange(-dims, dims) if dims and self._chance.random() < 0.98 else dims - 1

    def _size(self) -> int:
        first = self._first()
        if first.dim() == 0:
            return 1
        return first.shape[self._dim if -first.dim() <= self._dim < first.dim() else 0]

    def _p(self) -> str:
        size = self._size()
        return str(self._chance.randrange(-size, size) if size else 0)

    def _i(self) -> str:
        size = self._size()
        chosen = self._chance.sample(range(size), self._chance.randrange(size + 1)) if size else []
        return f"torch.tensor({chosen}, dtype=torch.int64, device=device)"

    def _g(self) -> str:
        first, size = self._first(), self._size()
        order = self._chance.sample(range(size), size)
        dim = self._dim % max(first.dim(), 1)
        shape = tuple(size if axis == dim else 1 for axis in range(first.dim()))
        text = f"torch.tensor({order}, dtype=torch.int64, device=device)"
        return text if first.dim() == 1 else f"{text}.reshape({shape}).expand({tuple(first.shape)})"

    def _z(self) -> str:
        first = self._first()
        count = first.numel()
        return str(
            self._chance.choice([(-1,), (count,), (count, 1), (1, count), (2, -1), tuple(first.shape)[::-1]])
        )
