"""The other ranks of a slice that is not here: whatever this rank calls, they would call it too."""

from __future__ import annotations


class AbsentPeers:
    """In the place of `Peers`."""

    timeout = 60.0
    last_call: tuple[str, int] | None = None
    has_raised = has_failed = False

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size

    def failure(self) -> None:
        return None

    def wait_for_failure(self, seconds: float) -> None:
        return None

    def raise_failure(self, group: str) -> None:
        pass

    def abort(self, group: str, where: str) -> str:
        return f"the group of ranks {group} was aborted by this rank, at {where}"

    def aborted(self) -> None:
        return None

    def why_late(self, group: str, number: int, seconds: float) -> str:
        return f"not done after {seconds:.0f} s"

    def let_first_end(self, seconds: float) -> None:
        pass

    def publish(self, error: str) -> None:
        pass

    def say_farewell(self) -> None:
        pass

    def call(self, group: str, number: int, digest: str) -> None:
        pass

    def agree(self, group: str, number: int, digest: str, text: str, seconds: float) -> None:
        pass

    def gather(self, group: str, number: int, digest: str, text: str, told: str, seconds: float) -> list[str]:
        return [told] * len(group.split(","))

    def confirm(self, seconds: float) -> None:
        pass

    def find_sender(self, calls: list[tuple[str, int]], seconds: float) -> int:
        return 0
