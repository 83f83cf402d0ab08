"""The page of PyTorch's own tests: what passed, what was skipped, and the failures that are known.

    python -m tests.upstream.report ROWS...

Each ROWS is a file that `tests.upstream.one_file` wrote. This writes `docs/upstream_tests.md`, and ends
with 1 if a test failed that `known.json` does not name, or if one that it names passed everywhere.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/upstream_tests.md"
KNOWN = Path(__file__).with_name("known.json")

_HEAD = """# PyTorch's own distributed tests

PyTorch's distributed tests run on the device as they are: their text is not changed. Each rank is a process
with one XLA device, and the backend is `"tpu"`; both are asserted before each test. This page is generated:

```bash
python -m tests.upstream.one_file distributed_test.py 2 nccl.jsonl
python -m tests.upstream.one_file distributed_test.py 2 gloo.jsonl --stands-for gloo
python -m tests.upstream.report nccl.jsonl gloo.jsonl
```

- The tests name CUDA and NCCL. Here `torch.cuda` is `torch.tpu` for a test file, every CUDA device is the
  rank's one device, and `"nccl"` is `"tpu"` (`tests/upstream/stand_in.py`).
- PyTorch skips many tests with NCCL, which has no CPU tensors. A second run has `"gloo"` for `"tpu"`, and
  puts tensors that a test makes without a device on the rank's device.
- Ranks go on from test to test, each with a new world, and start anew after a failure.
- A file is looked for in `PYTORCH_TESTS`, PyTorch's `test` directory, and else in the installed torch, whose
  wheel has `distributed_test.py` only.
- Tests whose ranks are threads of one process, or simulated (LocalTensor), prove the dispatch of DTensor and
  FSDP2 and no collective. The wheel has none of them, and none was run.
"""


def known_failures(file: str) -> Mapping[str, str]:
    """Why a test of this file fails, by name."""
    known: dict[str, dict[str, str]] = json.loads(KNOWN.read_text())
    return known.get(file, {})


def sometimes(known: Mapping[str, str]) -> set[str]:
    """Those whose failure is a matter of time."""
    return {name for name, why in known.items() if why.startswith("sometimes")}


def name_of(row: Mapping[str, Any]) -> str:
    return str(row["test"]).rpartition(".")[2]


def surprises(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Failures that are not known, and known ones, but for those of "sometimes", that only passed."""
    failed = {name_of(row) for row in rows if row["outcome"] == "failed"}
    found = []
    for row in rows:
        name, known = name_of(row), known_failures(row["file"])
        if row["outcome"] == "failed" and name not in known:
            found.append(f"{row['file']}: {name} failed: {row['why']}")
        elif row["outcome"] == "passed" and name not in failed | sometimes(known) and name in known:
            found.append(f"{row['file']}: {name} passed, and known.json says that it fails")
    return found


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page of these rows, of any files."""
    lines = [_HEAD, "## Real processes", "", "| file | ranks | stands for | passed | failed | skipped |"]
    lines.append("|---|---|---|---|---|---|")
    for (file, ranks, stands_for), run in _runs(rows).items():
        counts = Counter(row["outcome"] for row in run)
        numbers = " | ".join(str(counts[each]) for each in ("passed", "failed", "skipped"))
        lines.append(f"| `{file}` | {ranks} | {stands_for} | {numbers} |")
    lines += ["", "## Failures", "", "| test | ranks | stands for | why |", "|---|---|---|---|"]
    for row in rows:
        if row["outcome"] == "failed":
            why = known_failures(row["file"]).get(name_of(row), f"not known: {row['why']}")
            lines.append(f"| `{name_of(row)}` | {row['ranks']} | {row['stands_for']} | {why} |")
    lines += [
        "",
        "## Skipped by PyTorch",
        "",
        "| ranks | stands for | tests | PyTorch's reason |",
        "|---|---|---|---|",
    ]
    for (_, ranks, stands_for), run in _runs(rows).items():
        reasons = Counter(row["why"] for row in run if row["outcome"] == "skipped")
        lines += [f"| {ranks} | {stands_for} | {count} | {why} |" for why, count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def _runs(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, str], list[Mapping[str, Any]]]:
    """By file, number of ranks, and the backend that the device's stands for."""
    runs: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        runs.setdefault((row["file"], row["ranks"], row["stands_for"]), []).append(row)
    return runs


def main(paths: Sequence[str]) -> int:
    rows = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    PAGE.write_text(page(rows))
    found = surprises(rows)
    print("\n".join(found) or "no surprises")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
