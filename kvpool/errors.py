"""Every exception kvpool raises.

A miss, a refusal, a full pool are values; an exception is a broken promise, and its class says whose::

    KvpoolError
    ├── LocalError            you (this process, its caller, its configuration) broke it
    │   ├── ConfigError       a flag, a file or an argument is wrong; the message says what to do
    │   └── ClosedError       used after close()
    └── RemoteError           they (a peer, a server, the network) broke it
        ├── UnavailableError  not reachable, or gone while we waited
        ├── DeadlineError     the deadline passed first
        ├── AccessError       the peer doesn't know us, or we lack the right; the message says what to do
        ├── LimitError        the peer has had enough of us for now: above a rate or a size
        ├── ProtocolError     the peer said something that can't be
        └── FrameError        stored bytes failed validation; readers turn it into a miss
"""


class KvpoolError(Exception):
    """Root of all kvpool exceptions."""


class LocalError(KvpoolError):
    """The caller or this process broke a rule."""


class ConfigError(LocalError):
    """A flag, file or argument is wrong; the message says what to do about it."""


class ClosedError(LocalError):
    """The object was used after it had been closed."""


class RemoteError(KvpoolError):
    """A peer, a server or the network broke a promise."""


class UnavailableError(RemoteError):
    """The peer can't be reached, or went away while it was needed."""


class DeadlineError(RemoteError):
    """The deadline passed before the peer answered."""


class AccessError(RemoteError):
    """The peer doesn't know who we are (no token, a wrong or revoked one), or we lack the right to what we asked."""


class LimitError(RemoteError):
    """The peer refuses for now: more calls or bytes than our rate allows, or more in one call than it takes."""


class ProtocolError(RemoteError):
    """The peer's answer breaks the protocol."""


class FrameError(RemoteError):
    """Stored bytes failed validation (magic, version, length, key or checksum)."""
