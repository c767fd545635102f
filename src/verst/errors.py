"""Every exception that verst raises on purpose, in one tree.

Each takes one message and nothing else, so that it survives pickling between Ray actors.
What is not in this tree is a bug and crashes with its own traceback.
"""


class VerstError(Exception):
    """Base of all errors that a person or an operator can act on."""


class ConfigError(VerstError, ValueError):
    """A recipe is wrong. The message names the key, the value and what would be right."""


class ModelError(VerstError):
    """A model folder is missing, incomplete, of an unknown family, or does not fit the recipe."""


class PromptError(VerstError):
    """A prompt file or a prompt cannot be used as it is (empty, unreadable, longer than the encoder takes)."""


class DataError(VerstError):
    """Training data cannot be used as they are: a file, a table, or all of a source. The message names it."""


class RequestError(VerstError):
    """An engine refused a request (HTTP 4xx). The message is the engine's own."""


class EngineError(VerstError):
    """An engine failed or died while it worked on a request."""

    engine: str | None = None
    """URL of the one that has said so; unset where it is another's word."""


class EchoError(VerstError):
    """An engine answered with other sampling parameters, sigmas or weights than were asked for."""


class SyncError(VerstError):
    """A weight hand-off was not applied exactly: missing, unmatched or different tensors."""


class RewardError(VerstError):
    """A reward failed, or answered with the wrong number of scores."""

    permanent = False
    """Set on an error that asking again cannot mend, e.g. a request that a service refuses."""
    retry_after_s = 0.0
    """Set to the seconds that a service wants to be left alone for."""


class InvariantError(VerstError):
    """Something that must hold in every run does not: the run stops and says which."""


class CheckpointError(VerstError):
    """A checkpoint cannot be written, is incomplete or damaged, or does not fit the recipe."""


class ProcessDied(VerstError):
    """A process of the run ended by itself or was killed. The message says which."""


class StateLost(ProcessDied):
    """What only a process had is gone with it (the trainer's state, weights that engines need): a supervised run goes on
    from its newest checkpoint."""
