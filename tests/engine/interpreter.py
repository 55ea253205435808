"""Python snippets, each in a process of its own that has imported SGLang already.

The import takes ten seconds. One process does it and forks for each snippet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Reads one JSON object a line: a snippet, variables and two files. Writes an exit status a line.
# In a fork, an exception ends the loop: the interpreter prints it and exits, as for a script.
_SERVER = """
import json, os, sys

commands, statuses = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
exec(sys.argv[1])
print("ready", file=statuses, flush=True)
for line in commands:
    command = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(command[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ.update(command["environment"])
        exec(command["code"])
        sys.exit()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), file=statuses, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Result:
    """How a snippet ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Runs snippets one after another.

    Attributes:
        folder: for the snippets' output.
    """

    folder: Path
    server: subprocess.Popen[str]

    def run(self, code: str, **environment: str) -> Result:
        """Run a snippet with variables added to its environment, and wait for its end."""
        stdout, stderr = self.folder / "stdout", self.folder / "stderr"
        command = {
            "code": textwrap.dedent(code),
            "environment": environment,
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(command) + "\n")
        self.server.stdin.flush()
        return Result(int(self.read_line()), stdout.read_text(), stderr.read_text())

    def read_line(self) -> str:
        """Read the next line of the server.

        Raises:
            AssertionError: the server ended.
        """
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        assert line, f"the interpreter ended with {self.server.wait()}"
        return line.strip()


@contextmanager
def interpreter_with(prelude: str, folder: Path, **environment: str) -> Iterator[Interpreter]:
    """Start a process that runs ``prelude`` once, for all snippets."""
    with (
        (folder / "server").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-c", _SERVER, prelude],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
    ):
        interpreter = Interpreter(folder, server)
        assert interpreter.read_line() == "ready", (folder / "server").read_text()
        yield interpreter
