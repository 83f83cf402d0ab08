"""Check the list of models and print it; exits with 1 where one fails.

python -m tests.models                     # all of them, some minutes
python -m tests.models --only Llama        # those whose name or family contains this
python -m tests.models --rows models.jsonl # one JSON object a model as well
"""

import argparse
import sys
from pathlib import Path

from tests.models.table import ENTRIES, HEADER, json_line, line


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.models", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", default="", help="models whose name or family contains this")
    parser.add_argument("--rows", type=Path, help="append one JSON object a model to this file")
    options = parser.parse_args()
    chosen = [entry for entry in ENTRIES if options.only.lower() in f"{entry.name} {entry.family}".lower()]
    if not chosen:
        parser.error(f"--only {options.only}: no model has this in its name or family")
    print(HEADER, flush=True)
    failed = []
    for entry in chosen:
        row = entry.row()
        if not row.passed:
            failed.append(row.name)
        print(line(row), flush=True)
        if options.rows:
            with options.rows.open("a") as rows:
                rows.write(json_line(row) + "\n")
    short = f"; failing: {', '.join(failed)}" if failed else ""
    print(f"{len(chosen) - len(failed)} of {len(chosen)} models pass{short}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
