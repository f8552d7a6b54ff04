"""The tree of errors that Unicron raises on purpose.

UnicronError
├── UserError             the user's mistake; one sentence, exit code 2
│   └── InfeasibleError   nothing satisfies what was asked for, exit code 3
├── StoreError            the object store failed
│   └── ObjectNotFound    no object under that key
├── CheckpointError       a checkpoint is incomplete, damaged or of another job
├── ControllerError       the controller is unreachable or refused
│   ├── NodeNotConnected  the node that a command is for has no connection to the controller
│   └── CommandTimeout    the agent of a node has not answered in time
├── MetadataError         the instance metadata service of the cloud is out of reach or cannot be understood
├── AgentError            an agent cannot carry out what it was asked
├── StaleGeneration       a message of a generation that was replaced
└── IllegalTransition     our own mistake: an event that cannot follow the state
"""


class UnicronError(Exception):
    """Root of all errors that Unicron raises on purpose."""


class UserError(UnicronError, ValueError):
    """The user's mistake: what was found and what to do, in one sentence."""


class InfeasibleError(UserError):
    """No allocation, layout or placement satisfies what was asked for."""


class StoreError(UnicronError):
    """The object store failed or is out of reach."""


class ObjectNotFound(StoreError):
    """There is no object under that key."""


class CheckpointError(UnicronError):
    """A checkpoint is incomplete, damaged or does not fit the job."""


class SlotError(UnicronError):
    """A state in host memory cannot be kept, is gone, or is damaged; the message says which and why."""


class ControllerError(UnicronError):
    """The controller is out of reach or refused a request."""


class NodeNotConnected(ControllerError):
    """The node that a command is for has no connection to the controller."""


class CommandTimeout(ControllerError):
    """The agent of a node has not answered a command in time: the same step may be sent again."""


class MetadataError(UnicronError):
    """The cloud's instance metadata service is out of reach, refuses, or says something unknown."""


class AgentError(UnicronError):
    """An agent cannot carry out what it was asked; the message holds the cause."""


class StaleGeneration(UnicronError):
    """A command or report of a generation that has been replaced."""


class IllegalTransition(UnicronError):
    """An event that cannot follow the state: the message tells how we came there."""
