"""The exceptions that this project raises on purpose, as one tree.

PpdError
├── ConfigError          an option, an environment variable or a configuration file is wrong
├── ContractError        a message between router and worker is malformed
├── EngineError          a worker answered with an error, or not at all
├── ForeignFormatError   shared records have another format than this version reads
├── IndexFileError       a vector index, or what it is built from, cannot be read or written
├── MalformedBatchError  shared records cannot be decoded
├── RequestError         a client's request is wrong (HTTP 4xx)
│   └── Overloaded       the request may be retried later (HTTP 429)
├── TableError           a decision table is malformed, or was measured with another model
└── WorkerError          a worker is unreachable, or is not what the router needs

``ppd`` and ``sglang_patches`` define no other exception. Packages above them derive theirs from
these classes.
"""

from __future__ import annotations

from ppd.outcome import Outcome


class PpdError(Exception):
    """Base of every exception that this project raises on purpose.

    The message is one line. It names what is wrong and what is allowed.
    """


class ConfigError(PpdError):
    """An option, an environment variable or a configuration file is wrong."""


class ContractError(PpdError):
    """A message between router and worker is malformed."""


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


class ForeignFormatError(PpdError):
    """Records of another router have another format than this version reads.

    Attributes:
        found: the number of their format.
    """

    def __init__(self, found: int, known: int) -> None:
        super().__init__(f"records of format {found}; this version reads format {known}")
        self.found = found


class IndexFileError(PpdError):
    """A vector index, or what it is built from, cannot be read, written or loaded."""


class MalformedBatchError(PpdError):
    """Records of a shared store cannot be decoded."""


class RequestError(PpdError):
    """A client's request is wrong and is not sent to any worker.

    Attributes:
        status: the HTTP status of the response.
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
    """A request is refused for lack of capacity and may be retried later (HTTP 429).

    Attributes:
        retry_after_s: seconds after which a retry may succeed.
    """

    def __init__(self, message: str, *, retry_after_s: float, code: str = "overloaded") -> None:
        super().__init__(message, status=429, code=code)
        self.retry_after_s = retry_after_s


class TableError(PpdError):
    """A decision table is malformed, or was measured with another model."""


class WorkerError(PpdError):
    """A worker is unreachable, or is not what the router needs."""
