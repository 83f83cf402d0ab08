"""Root writes everywhere unless it may not."""

import ctypes

PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1


def obey_file_modes() -> None:
    """For `preexec_fn`: file modes bind the program that follows, as they do for anybody but root."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)
