"""The process that measures: reads keys of entries, a line each, and answers with a JSON row each."""

from __future__ import annotations

import sys
import warnings

from tests.operators.database import Entry


def main() -> None:
    most_samples = int(sys.argv[1]) if len(sys.argv) > 1 else None
    answers = sys.stdout
    sys.stdout = sys.stderr  # what an operator prints is no row
    warnings.simplefilter("ignore")
    from tests.operators.check import check

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(check(Entry.from_key(line.strip()), most_samples).to_json(), file=answers, flush=True)


if __name__ == "__main__":
    main()
