"""One of several processes makes what all of them want."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, time
from pathlib import Path
from tputrain.data.built_once import built_once
path = Path(sys.argv[1])

def build(path):
    time.sleep(0.3)
    path.write_text("made")
    print("made it")

built_once(path, "it", lambda line: None, "cache", build)
"""


def test_one_of_six_processes_makes_it_and_no_lock_is_left(tmp_path: Path):
    path = tmp_path / "it"
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    said = [each.communicate(timeout=120)[0] for each in processes]
    assert [each.returncode for each in processes] == [0] * 6
    assert sorted(said) == [""] * 5 + ["made it\n"]
    assert [each.name for each in tmp_path.iterdir()] == ["it"]
