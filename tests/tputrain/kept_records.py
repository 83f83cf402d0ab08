"""A logger that keeps what it is told."""

from tputrain.loggers.logger import Logger, Record


class KeptRecords(Logger):
    def __init__(self) -> None:
        self.steps: list[Record] = []
        self.evaluations: list[Record] = []
        self.drains: list[int] = []
        """How many records came at a time."""

    def log(self, records: list[Record]) -> None:
        self.steps += records
        self.drains.append(len(records))

    def log_evaluation(self, record: Record) -> None:
        self.evaluations.append(record)
