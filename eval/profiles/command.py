"""``ppd-eval profile``: the profiles of models on GPUs, listed and made."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..options import Commands, add_out
from .calibrating import calibrated, read_steps
from .files import FOLDER, known, write_file
from .making import make
from .profile import Extend, Step, load_profile
from .recipes import RECIPES, recipe_of


def add_to(commands: Commands) -> None:
    """Declare ``profile list``, ``make``, ``calibrate`` and ``measure``."""
    listing = commands.add_parser(
        "list",
        help="the profiles, and a few of their steps",
        description="List the profiles with the milliseconds of a few steps.",
    )
    listing.set_defaults(run=run_list)
    making = commands.add_parser(
        "make",
        help="make profiles from aiconfigurator",
        description="Make profiles from aiconfigurator's data (the extra 'profiles').",
    )
    making.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: all of {len(RECIPES)} recipes"
    )
    making.add_argument("--folder", type=Path, help="default: the package's own")
    making.set_defaults(run=run_make)
    fitting = commands.add_parser(
        "calibrate",
        help="fit an engine's step times",
        description=(
            "Fit a factor and a constant a step to measured steps (docs/EMULATION.md), and add "
            "them to a copy of a profile under a name."
        ),
    )
    fitting.add_argument("profile", help="a profile's name, or a .json")
    fitting.add_argument("--name", required=True, help="of the calibration")
    fitting.add_argument("--steps", type=Path, required=True, help="JSON list of measured steps")
    fitting.add_argument("--source", required=True, help="where they were measured: one line")
    fitting.add_argument("--out", type=Path, required=True, help="the profile to write: a .json")
    fitting.set_defaults(run=run_calibrate)
    measuring = commands.add_parser(
        "measure",
        help="steps on this GPU, beside a profile's",
        description=(
            "Measure steps of a profile's model with random weights on this GPU, and print them "
            "beside the profile's. The last line is one JSON object."
        ),
    )
    measuring.add_argument("profile", help="a profile's name, or a .json")
    measuring.add_argument("--layers", type=int, help="fewer layers, for a trial")
    add_out(measuring)
    measuring.set_defaults(run=run_measure)


def run_list(_options: argparse.Namespace) -> int:
    """Print a table of the profiles."""
    print("profile                 KV bytes  pool tokens  200@8k  8k prompt  decode b1  b64  error")
    for name in known():
        profile = load_profile(name)
        steps = (
            Step((Extend(200, 8192),)),
            Step((Extend(8192, 0),)),
            Step((), 1, 8192),
            Step((), 64, 64 * 8192),
        )
        times = "  ".join(f"{profile.step_ms(step):8.2f}" for step in steps)
        found = profile.file.interpolation
        print(
            f"{name:22}  {profile.kv_bytes_per_token:8}  {profile.kv_pool_tokens:11,}  {times}  "
            f"{found.median_error:.1%}, at most {found.max_error:.1%}"
        )
    return 0


def run_make(options: argparse.Namespace) -> int:
    """Make profiles.

    Raises:
        ConfigError: a name is unknown, or aiconfigurator is missing or of another version.
    """
    recipes = [recipe_of(name) for name in options.names] or list(RECIPES)
    for recipe in recipes:
        out = (options.folder or FOLDER) / f"{recipe.name}.json"
        file = make(recipe, out)
        error = file.interpolation
        print(
            f"{out}: error of interpolation {error.median_error:.2%} in the median, "
            f"{error.max_error:.2%} at most ({error.worst})",
            flush=True,
        )
    return 0


def run_calibrate(options: argparse.Namespace) -> int:
    """Fit a calibration, and write the profile that has it.

    Raises:
        ConfigError: a file cannot be read or written, or the steps allow no fit.
    """
    file = load_profile(options.profile).file
    steps = read_steps(options.steps)
    made = calibrated(file, options.name, steps, options.source)
    write_file(options.out, made)
    fitted = made.calibrations[-1]
    print(f"{options.out}: {fitted.factor:g} x + {fitted.step_ms:g} ms; {fitted.source}")
    return 0


def run_measure(options: argparse.Namespace) -> int:
    """Measure a profile's steps on this GPU.

    Raises:
        ConfigError: there is no such profile or no GPU, or the model cannot be measured.
    """
    from . import measuring  # PyTorch and Triton are slow to import, and needed only here

    return measuring.run(load_profile(options.profile), options.out, options.layers)
