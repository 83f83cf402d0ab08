"""`tputrain report`: runs on one self-contained HTML page. Needs their directories only, and no PyTorch."""

from tputrain.report.page import report_page
from tputrain.report.run_files import Checkpoint, Run, read_run

__all__ = ["Checkpoint", "Run", "read_run", "report_page"]
