"""Every error this project raises on purpose.

PpdError
├── ConfigError      an option or environment variable is wrong
├── ContractError    a local-prefill marker in a request is malformed
├── EngineError      a worker answered with an error, or not at all
├── IndexFileError   a vector index, or what it is built from, cannot be read or written
├── RequestError     a client's request is wrong (becomes HTTP 4xx)
│   └── Overloaded   it may come again later (429)
├── TableError       a decision table is malformed, or of another model
└── WorkerError      a worker is unreachable, or is not what the router needs
"""

from __future__ import annotations

from ppd.outcome import Outcome


class PpdError(Exception):
    """Base of the tree; the message is one line and names what is wrong and what is allowed."""


class ConfigError(PpdError):
    pass


class ContractError(PpdError):
    pass


class EngineError(PpdError):
    """What a worker made of a request, as the client gets it.

    Attributes:
        status: of HTTP.
        kind: OpenAI's ``type`` of the error.
        retry_after_s: as a busy worker has given it.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: str = "worker_error",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.retry_after_s = retry_after_s

    @property
    def outcome(self) -> Outcome:
        """How a request ends that gets this error: a 4xx is the client's, but for 429."""
        if self.status == 429:
            return Outcome.OVERLOADED
        return Outcome.REJECTED if 400 <= self.status < 500 else Outcome.WORKER_ERROR


class IndexFileError(PpdError):
    pass


class RequestError(PpdError):
    """A request that no worker shall see.

    Attributes:
        status: the HTTP status for the client.
        param: the field at fault, as OpenAI's error objects name it.
        code: OpenAI's machine-readable code, where one exists.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class Overloaded(RequestError):
    """Not now.

    Attributes:
        retry_after_s: when it may be worth trying again.
    """

    def __init__(self, message: str, *, retry_after_s: float, code: str = "overloaded") -> None:
        super().__init__(message, status=429, code=code)
        self.retry_after_s = retry_after_s


class TableError(PpdError):
    pass


class WorkerError(PpdError):
    pass
