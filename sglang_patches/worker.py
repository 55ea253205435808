"""``ppd-worker``: starts ``sglang.launch_server`` with the flags that its role needs.

It owns only the choice of flags and environment. The process *becomes* the server (``exec``), so
signals, the exit code and the supervision of children are SGLang's own. Every flag that is not
its own is passed through. A flag of the caller replaces the one that this module would add.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ppd.contract import Role
from ppd.errors import ConfigError
from ppd.extras import install
from sglang_patches import settings
from sglang_patches.settings import read_settings

_KEY_FLAGS = ("--api-key", "--admin-api-key")


@dataclass(frozen=True, slots=True)
class Launch:
    """A command to run: ``argv`` for ``exec``, and the variables to add to the environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        """As a command line, without keys: it goes into the log."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(_without_keys(self.argv))])


def _without_keys(argv: Iterable[str]) -> Iterator[str]:
    follows = False  # the value of a flag for a key
    for word in argv:
        flag, separator, _ = word.partition("=")
        is_key = flag in _KEY_FLAGS
        yield "***" if follows else f"{flag}=***" if is_key and separator else word
        follows = is_key and not separator


# The plugin's options as flags: variable, placeholder (None: a switch), meaning.
_OPTIONS: dict[str, tuple[str, str | None, str]] = {
    "--ppd-tpot-target-ms": (
        settings.TPOT_TARGET_MS,
        "MS",
        "decode: TPOT that running decodes keep beside local prefill "
        "(default: at most 1.5 times the TPOT without local prefill)",
    ),
    "--ppd-append-chunk": (
        settings.APPEND_CHUNK,
        "TOKENS",
        "decode: a fixed chunk beside running decodes, in place of a target",
    ),
    "--ppd-max-append-tokens": (
        settings.MAX_APPEND_TOKENS,
        "TOKENS",
        "decode: refuse local prefills beyond so many uncached tokens under way",
    ),
    "--ppd-unroomed": (
        settings.UNROOMED,
        None,
        "decode: prefill requests without a bootstrap room here, for routers that leave the "
        "prefill worker out",
    ),
    "--ppd-link-gbps": (
        settings.LINK_GBPS,
        "GBPS",
        "gigabits a second of this worker's link, by which routers choose a shipped table "
        "(default: of the devices of --disaggregation-ib-device)",
    ),
    "--ppd-routers": (
        settings.ROUTERS,
        "URL[,URL...]",
        "announce this worker to these routers; their secret, if any, is $PPD_WORKER_TOKEN",
    ),
    "--ppd-advertise-url": (
        settings.ADVERTISE_URL,
        "URL",
        "base URL under which routers reach this worker (default: from --host and --port)",
    ),
}

_THREADS = "OMP_NUM_THREADS"
_MOONCAKE_TCP = {"MC_FORCE_TCP": "true", "MOONCAKE_PROTOCOL": "tcp"}


def plan_launch(
    role: Role,
    passed: Sequence[str],
    *,
    cpu: bool,
    environment: Mapping[str, str],
    float32: bool = False,
    alternate: bool = False,
    plain: bool = False,
    engine: str = "",
    cpu_threads: int | None = None,
    options: Mapping[str, str] | None = None,
) -> Launch:
    """Choose the command and the environment of a server.

    Args:
        role: the role of the worker.
        passed: SGLang flags from the caller, in SGLang's own spelling.
        cpu: run on a machine without GPU.
        environment: the caller's variables, which win over the ones added here.
        float32: whether the model's weights are float32, which ``--dtype auto`` would halve.
        alternate: run chunks between decode steps, not in them.
        plain: run without the plugin; a decode worker keeps no KV between turns.
        engine: version of SGLang.
        cpu_threads: of each forward on a CPU, which wins over the caller's variables; None for
            OpenMP's own number, all cores of the process.
        options: variables of the plugin, which win over the caller's.
    """
    flags: dict[str, str | None] = {"--enable-cache-report": None}
    if float32:
        flags["--dtype"] = "float32"
    added: dict[str, str] = {}
    if role is not Role.REPLICA:
        if plain:
            options = {settings.ENABLE: "0"}  # whatever the caller's environment has
        else:
            added[settings.ENABLE] = "1"
        flags |= {
            "--disaggregation-mode": role.value,
            "--disaggregation-transfer-backend": "mooncake",
        }
    if role is Role.PREFILL and not cpu and engine == "0.5.21":
        # With overlap, SGLang sends a cached prefix's KV before the forward that may still be
        # writing it has ended. This version's sender does not wait for that forward, later ones'
        # does (mooncake/conn.py, wait_event; sgl-project/sglang#39417).
        added["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = "0"
    if role is Role.DECODE and plain:
        flags["--disaggregation-decode-retraction-backup"] = "cpu_tensor"
    elif role is Role.DECODE:
        flags["--disaggregation-decode-enable-radix-cache"] = None
        # The size of a chunk when nothing decodes; new requests wait for its end.
        flags["--chunked-prefill-size"] = "512" if cpu else "2048"
        if not alternate:
            flags["--enable-mixed-chunk"] = None  # chunks run in the forwards of running decodes
    if cpu:
        flags |= {
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--grammar-backend": "xgrammar",
            "--max-total-tokens": "65536",
            "--max-running-requests": "64",
            "--sleep-on-idle": None,
        }
        if role is Role.PREFILL:
            # On a CPU a forward blocks the scheduler. With overlap, a finished prompt would wait
            # for the next prompt's forward before it is sent.
            flags["--disable-overlap-schedule"] = None
        added["SGLANG_USE_CPU_ENGINE"] = "1"
        if role is not Role.REPLICA:
            added |= _MOONCAKE_TCP

    given = {flag.partition("=")[0] for flag in passed if flag.startswith("--")}
    given |= _in_config_file(passed).keys() - {"--disaggregation-mode"}  # the role's, in any case
    defaults = [
        part
        for flag, value in flags.items()
        if flag not in given
        for part in ([flag] if value is None else [flag, value])
    ]
    module = "sglang_patches.cpu.launch" if cpu else "sglang.launch_server"
    return Launch(
        argv=(sys.executable, "-m", module, *passed, *defaults),
        environment={
            **{k: v for k, v in added.items() if k not in environment},
            **({} if cpu_threads is None else {_THREADS: str(cpu_threads)}),
            **(options or {}),
        },
    )


def _device(passed: Sequence[str]) -> str | None:
    """The device that the caller names; None: SGLang chooses it."""
    for place, word in enumerate(passed):
        flag, separator, value = word.partition("=")
        if flag == "--device":
            return value if separator else "".join(passed[place + 1 : place + 2])
    named = _in_config_file(passed).get("--device")
    return None if named is None else str(named)


def _in_config_file(passed: Sequence[str]) -> dict[str, Any]:
    """The flags that the file of SGLang's ``--config`` sets (server_args_config_parser.py).

    A flag of the command line would replace the file's. A file that cannot be read is SGLang's to
    report.
    """
    if "--config" not in passed[:-1]:
        return {}
    import yaml  # SGLang needs it

    try:
        fields = yaml.safe_load(Path(passed[passed.index("--config") + 1]).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(fields, dict):
        return {}
    return {f"--{str(name).replace('_', '-')}": value for name, value in fields.items()}


def _is_float32(model_path: str) -> bool:
    """Whether the weights of a local model are float32; False for one not downloaded yet."""
    config = Path(model_path) / "config.json"
    try:
        fields = json.loads(config.read_text())
    except (OSError, ValueError):
        return False  # SGLang reads the file too, and reports what is wrong with it
    return "float32" in (fields.get("dtype"), fields.get("torch_dtype"))


def _taken(threads: int | None) -> str:
    """What a worker on a CPU takes of the machine, and the reason, in one line."""
    cores = len(os.sched_getaffinity(0))
    if threads is not None:
        return f"{threads} OpenMP thread(s) on {cores} core(s) (--cpu-threads)"
    if variable := os.environ.get(_THREADS):
        return f"{variable} OpenMP thread(s) on {cores} core(s) (${_THREADS})"
    return f"{cores} OpenMP thread(s) on {cores} core(s) (all of them; --cpu-threads sets a share)"


def _engine_version() -> str:
    """The version of the installed SGLang; "" if there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError as error:
        raise SystemExit(
            f"ppd-worker: SGLang is not installed here: {install('engine')}, or the CPU engine "
            "(sglang_patches/cpu/install.py)"
        ) from error

    return bool(torch.cuda.is_available())


class _CheckEngine(argparse.Action):
    """Prints the report of ``engine_check`` and ends; 1 if anything has moved."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, *_: object) -> None:
        _has_gpu()  # ends with the reason where SGLang is not installed
        from sglang_patches.cpu import stand_ins

        stand_ins.install()
        from sglang_patches.engine_check import check_engine
        from sglang_patches.hooks import HOOKS

        lines, moved = check_engine(HOOKS)
        print("\n".join(lines))
        sys.exit(1 if moved else 0)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; it leaves flags of SGLang to its caller."""
    parser = argparse.ArgumentParser(
        prog="ppd-worker",
        description="Start an SGLang worker for a PPD cluster. Flags not listed here go to "
        "sglang.launch_server unchanged, e.g. --port 30000 --tp-size 2.",
        allow_abbrev=False,
    )
    parser.add_argument("--role", required=True, choices=[role.value for role in Role])
    parser.add_argument(
        "--model-path", "--model", required=True, help="model, as for sglang.launch_server"
    )
    parser.add_argument(
        "--ppd-alternate",
        action="store_true",
        help="decode: run chunks between the forwards of running decodes, not in them "
        "(leaves --enable-mixed-chunk out)",
    )
    parser.add_argument(
        "--ppd-plain",
        action="store_true",
        help="SGLang as it comes, to compare with: without this plugin, and a decode worker "
        "keeps no KV between turns",
    )
    parser.add_argument(
        "--cpu-threads",
        type=int,
        metavar="N",
        help="threads of a forward on a CPU, its share of the machine's cores (default: "
        f"${_THREADS}, else all cores; workers that share cores need less each)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and stop")
    parser.add_argument(
        "--check-engine",
        action=_CheckEngine,
        help="print what the installed SGLang has moved of what the plugin uses, and stop",
    )
    for flag, (variable, metavar, help_text) in _OPTIONS.items():
        if metavar is None:
            parser.add_argument(
                flag, dest=variable, action="store_const", const="1", help=help_text
            )
        else:
            parser.add_argument(flag, dest=variable, metavar=metavar, help=help_text)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the ``ppd-worker`` command: parse its arguments and become the server."""
    parser = make_parser()
    options, passed = parser.parse_known_args(argv)

    device = _device(passed)
    cpu = not _has_gpu() if device is None else device == "cpu"
    if any(flag.partition("=")[0] == "--disaggregation-mode" for flag in passed):
        parser.error("--role sets --disaggregation-mode; give only --role")
    threads = options.cpu_threads
    if threads is not None and not cpu:
        parser.error("--cpu-threads is for workers on a CPU")
    if threads is not None and threads < 1:
        parser.error(f"--cpu-threads must be 1 or more, got {threads}")
    given = {
        variable: value
        for variable, _, _ in _OPTIONS.values()
        if (value := getattr(options, variable)) is not None
    }
    if given and options.role == Role.REPLICA:
        parser.error("a replica runs without the plugin; --ppd options are for the other roles")
    if options.ppd_plain and (given or options.ppd_alternate):
        parser.error("--ppd-plain runs without the plugin; no other --ppd option is for it")
    try:
        if options.role != Role.REPLICA:
            read_settings({settings.ENABLE: "1", **os.environ, **given})
    except ConfigError as error:
        parser.error(str(error))
    launch = plan_launch(
        Role(options.role),
        ["--model-path", options.model_path, *passed],
        cpu=cpu,
        environment=os.environ,
        float32=_is_float32(options.model_path),
        alternate=options.ppd_alternate,
        plain=options.ppd_plain,
        engine=_engine_version(),
        cpu_threads=threads,
        options=given,
    )
    print(f"ppd-worker: {launch}", file=sys.stderr, flush=True)
    if cpu:
        print(f"ppd-worker: {_taken(threads)}", file=sys.stderr, flush=True)
    if not options.dry_run:
        os.execvpe(launch.argv[0], launch.argv, {**os.environ, **launch.environment})


if __name__ == "__main__":
    main()
