"""Everything Evergrad raises, sorted by what the caller can do about it.

EvergradError
+-- ConfigError        fix the script, the command or the model and start again
|   +-- DataError      ... or the data: the message names file, column and row where it knows them
+-- Unavailable        wait or retry: somebody needed is not there, or not yet
+-- Fenced             leave: a newer process has taken this one's part
+-- CheckpointError    use another checkpoint or model
|   +-- StorageError   ... or mend the storage: it cannot be read or written, and was tried again where that can help
+-- JobFailed          the job has ended without success; the message says why
+-- InvariantError     report a bug: Evergrad found itself in a state that cannot be
"""


class EvergradError(Exception):
    """Any error of Evergrad; its text is one sentence or two that say what to do."""


class ConfigError(EvergradError):
    """The script, the command line or the model asks for something that cannot be done."""


class DataError(ConfigError):
    """The data cannot be used as it is."""


class Unavailable(EvergradError):
    """A process needed for this is not there, or did not answer in time."""


class Fenced(EvergradError):
    """Another process has taken this one's part; it must stop."""


class CheckpointError(EvergradError):
    """A checkpoint or a model cannot be read or does not fit."""


class StorageError(CheckpointError):
    """A storage did not do what was asked of it.

    Attributes:
        is_missing: the file, or the bucket, is not there.
        is_full: there is no room.
    """

    def __init__(self, text: str, is_missing: bool = False, is_full: bool = False) -> None:
        super().__init__(text)
        self.is_missing, self.is_full = is_missing, is_full


class JobFailed(EvergradError):
    """The job has ended without success."""


class InvariantError(EvergradError):
    """A bug in Evergrad: a state that cannot be."""
