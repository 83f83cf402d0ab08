"""The page of PyTorch's own tests: what passed, what was skipped, and the failures that are known.

    python -m tests.upstream.report ROWS...

Each ROWS is a file of `tests.upstream.one_file`, called FILE-WORLD_SIZE.jsonl. It writes
`docs/upstream_tests.md`, and ends with 1 if a test failed that `known.json` does not name, or if one that it
names passed.
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
python -m tests.upstream.one_file distributed_test.py 2 /tmp/distributed_test.py-2.jsonl
python -m tests.upstream.report /tmp/distributed_test.py-2.jsonl
```

- The tests name CUDA and NCCL. Here `torch.cuda` is `torch.tpu` for a test file, every CUDA device is the
  rank's one device, and `"nccl"` is `"tpu"` (`tests/upstream/stand_in.py`).
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


def name_of(row: Mapping[str, Any]) -> str:
    return str(row["test"]).rpartition(".")[2]


def surprises(file: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Failures that are not known, and known ones that passed."""
    known = known_failures(file)
    found = []
    for row in rows:
        name = name_of(row)
        if row["outcome"] == "failed" and name not in known:
            found.append(f"{file}: {name} failed: {row['why']}")
        elif row["outcome"] == "passed" and name in known:
            found.append(f"{file}: {name} passed, and known.json says that it fails")
    return found


def page(runs: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]) -> str:
    """The page of these runs, by file and number of ranks."""
    lines = [
        _HEAD,
        "## Real processes",
        "",
        "| file | ranks | passed | failed | skipped |",
        "|---|---|---|---|---|",
    ]
    for (file, world_size), rows in runs.items():
        counts = Counter(row["outcome"] for row in rows)
        lines.append(
            f"| `{file}` | {world_size} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |"
        )
    lines += ["", "## Failures", "", "| test | ranks | why |", "|---|---|---|"]
    for (file, world_size), rows in runs.items():
        known = known_failures(file)
        for row in rows:
            if row["outcome"] == "failed":
                why = known.get(name_of(row), f"not known: {row['why']}")
                lines.append(f"| `{name_of(row)}` | {world_size} | {why} |")
    lines += ["", "## Skipped by PyTorch", "", "| ranks | tests | its reason |", "|---|---|---|"]
    for (_, world_size), rows in runs.items():
        reasons = Counter(row["why"] for row in rows if row["outcome"] == "skipped")
        lines += [f"| {world_size} | {count} | {reason} |" for reason, count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def main(paths: Sequence[str]) -> int:
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for path in map(Path, paths):
        file, _, world_size = path.stem.rpartition("-")
        runs[file, int(world_size)] = [json.loads(line) for line in path.read_text().splitlines()]
    PAGE.write_text(page(runs))
    found = [each for (file, _), rows in runs.items() for each in surprises(file, rows)]
    print("\n".join(found) or "no surprises")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
