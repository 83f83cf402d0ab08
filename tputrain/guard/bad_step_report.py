"""What is kept of a step whose loss or gradient norm is not a number, or a spike.

`run_dir/nonfinite/step-N/` holds its micro-batches as `batch-0.safetensors` and so on, and `report.json`: the
step's record, what in the batch itself is not finite, and what a replay (`tputrain.guard.first_nonfinite`)
found.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tputrain import exact_json
from tputrain.announce import warn
from tputrain.batches import Batch
from tputrain.errors import in_words
from tputrain.guard.first_nonfinite import describe
from tputrain.loggers.logger import Record

_MOST_ROWS = 3
"""That are named of a tensor in a batch."""

JUDGED = ("loss", "grad_norm")


def is_finite(record: Record) -> bool:
    """Whether the record's loss and gradient norm are numbers."""
    return all(math.isfinite(record[name]) for name in JUDGED)


def what_is_bad(record: Record, spike_limit: float) -> str | None:
    """`step 7: loss is nan`, `step 7: grad_norm is 35.2, over the limit of 9.1 for spikes`; None: nothing."""
    step = f"step {record['step']}"
    for name in JUDGED:
        if not math.isfinite(record[name]):
            return f"{step}: {name} is {record[name]}"
    if record["grad_norm"] > spike_limit:
        return (
            f"{step}: grad_norm is {record['grad_norm']:.4g}, over the limit of {spike_limit:.4g} for spikes"
        )
    return None


def bad_step_directory(run_dir: Path, step: int) -> Path:
    """Where the batch and the report of a bad step are."""
    return run_dir / "nonfinite" / f"step-{step}"


def save_bad_batch(run_dir: Path, record: Record, batches: list[Batch]) -> Path | None:
    """Write the micro-batches of a step and the beginning of its report.

    Returns their directory; None, and a line on standard error, where the disk does not take them.
    """
    directory = bad_step_directory(run_dir, record["step"])
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _save(directory, record, batches)
    except (OSError, SafetensorError) as error:
        warn(f"{directory}: the batch of a bad step cannot be kept ({in_words(error)})")
        return None
    return directory


def not_finite_in(batches: list[Batch]) -> dict[str, Any]:
    """What of a step's micro-batches is NaN or infinite, described, by "batch-NUMBER: NAME", with its first
    rows.
    """
    return {
        f"batch-{number}: {name}": describe(tensor) | {"rows": _rows_not_finite(tensor)}
        for number, batch in enumerate(batches)
        for name, tensor in _named_tensors(batch)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    }


def _rows_not_finite(tensor: Tensor) -> list[int]:
    """The first few; none where the tensor has no rows."""
    if tensor.dim() == 0:
        return []
    is_bad = tensor.isfinite().logical_not().reshape(len(tensor), -1).any(1)
    found: list[int] = is_bad.nonzero().flatten()[:_MOST_ROWS].tolist()
    return found


def _save(directory: Path, record: Record, batches: list[Batch]) -> None:
    for number, batch in enumerate(batches):
        save_file(
            {name: tensor.contiguous().clone() for name, tensor in _named_tensors(batch)},
            directory / f"batch-{number}.safetensors",
        )
    values = {key: value if _is_json(value) else str(value) for key, value in record.items()}
    _write(directory, {"record": values, "not_finite_in_batch": not_finite_in(batches), "replay": None})


def add_replay(directory: Path, found: dict[str, Any], note: str) -> None:
    """Complete the report in `directory` by what a replay found; `note` says from which state.

    Where the report could not be written, or cannot be now, there is a line on standard error.
    """
    try:
        report = exact_json.loads((directory / "report.json").read_text(encoding="utf-8"))
        _write(directory, report | {"replay": {"note": note} | found})
    except (OSError, ValueError) as error:
        warn(f"{directory}: what the replay of a bad step found cannot be kept ({in_words(error)})")


def data_to_blame(found: dict[str, Any], batches: list[Batch]) -> list[str]:
    """What of the micro-batches is not finite, in words, where a replay `found` no operation that made it.
    Infinities of a mask are no fault.
    """
    if found:
        return []
    blamed = []
    for key, described in not_finite_in(batches).items():
        batch, _, name = key.partition(": ")
        rows = ", ".join(map(str, described["rows"]))
        tensor = f"tensor {name}" if name.isdigit() else name
        blamed.append(f"{tensor} of {batch}" + (f" in row {rows}" if rows else ""))
    return blamed


def in_one_line(found: dict[str, Any], batches: list[Batch]) -> str:
    """What a replay of a step with these micro-batches found, as part of a sentence."""
    if given := data_to_blame(found, batches):
        return f"the data holds NaN or infinity: {'; '.join(given)}"
    if not found:
        return "the replay found no operation that makes it of finite values"
    first = next(iter(found.values()))
    words = {"nan": "NaN", "inf": "infinity"}
    inputs = "; ".join(
        f"{each['dtype']}{each['shape']} from {each.get('min')} to {each.get('max')}"
        for each in first["inputs"]
    )
    return f"{first['op']} made the first {words[first['made']]} from ({inputs}) at {first['line']}"


def _named_tensors(batch: Batch, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield name or "batch", batch
    elif isinstance(batch, Mapping | list | tuple):
        for key, value in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
            yield from _named_tensors(value, f"{name}.{key}" if name else str(key))


def _write(directory: Path, report: dict[str, Any]) -> None:
    (directory / "report.json").write_text(exact_json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _is_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
