"""Profiles: their files, interpolation, bounds and errors."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from eval.profiles.calibrating import MeasuredStep, calibrated, read_steps
from eval.profiles.files import FOLDER, Calibration, find, known, read_file, write_file
from eval.profiles.grid import Axis, Line, OutsideProfileError, Plane
from eval.profiles.making import PACKAGE, VERSION
from eval.profiles.profile import Extend, Profile, Step, load_profile
from eval.profiles.recipes import RECIPES, recipe_of
from ppd.errors import ConfigError

NAME = "llama-3.1-8b-h100-tp1"


def test_a_line_is_linear_between_its_points_and_is_continued_to_twice_the_last() -> None:
    line = Line(Axis("tokens", (1, 10, 20)), (1.0, 10.0, 40.0))
    assert line.at(5.5) == pytest.approx(5.5)
    assert line.at(15) == pytest.approx(25)
    assert line.at(40) == pytest.approx(100)
    for value in (40.1, 0.4):
        with pytest.raises(OutsideProfileError, match=r"tokens .* outside the profile"):
            line.at(value)
    assert line.axis.covers(20)
    assert not line.axis.covers(20.1)


def test_a_plane_is_linear_in_both_axes() -> None:
    plane = Plane(Axis("a", (0, 10)), Axis("b", (0, 100)), ((0.0, 10.0), (20.0, 50.0)))
    assert plane.at(5, 50) == pytest.approx((0 + 10 + 20 + 50) / 4)
    with pytest.raises(OutsideProfileError, match="b 201"):
        plane.at(5, 201)


@pytest.mark.parametrize("points", [(1,), (1, 1), (2, 1)])
def test_an_axis_must_ascend(points: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="ascending"):
        Axis("tokens", points)


def test_tables_must_fit_their_axes() -> None:
    with pytest.raises(ConfigError, match="one value"):
        Line(Axis("tokens", (1, 2)), (1.0,))
    with pytest.raises(ConfigError, match="wrong number"):
        Plane(Axis("a", (1, 2)), Axis("b", (1, 2)), ((1.0, 2.0), (1.0,)))


def test_every_recipe_has_a_profile_with_its_origin() -> None:
    fitted = "llama-3.1-8b-h100-vllm"  # eval/simulation/fitted_profile.py
    assert known() == sorted([fitted, *(recipe.name for recipe in RECIPES)])
    for name in (recipe.name for recipe in RECIPES):
        file = load_profile(name).file
        assert file.name == name
        assert (file.source.package, file.source.version) == (PACKAGE, VERSION)
        assert file.source.license == "Apache-2.0"
        assert file.interpolation.median_error < 0.01
        assert file.interpolation.max_error < 0.15
        assert file.links_gbps == (25, 100, 400)


def test_the_notice_names_every_profile() -> None:
    notice = (Path(__file__).parents[2] / "NOTICE").read_text()
    assert f"{PACKAGE} {VERSION}" in notice
    assert all(f"{name}.json" in notice for name in known())


@pytest.mark.parametrize(
    ("step", "ms"),
    [
        # What the package itself answers, from a run of it.
        (Step((Extend(8192, 0),)), 205.73),
        (Step((Extend(200, 8192),)), 9.485),
        (Step((), 1, 8192), 6.788),
        (Step((), 64, 64 * 8192), 28.855),
    ],
)
def test_steps_of_a_profile_are_those_of_the_package(step: Step, ms: float) -> None:
    profile = load_profile(NAME)
    assert profile.step_ms(step) == pytest.approx(ms, rel=0.03)
    assert profile.covers(step)


def test_a_mixed_step_takes_longer_than_its_parts_alone_and_less_than_both() -> None:
    profile = load_profile(NAME)
    chunk, decodes = Step((Extend(512, 4096),)), Step((), 32, 32 * 1024)
    mixed = profile.step_ms(Step(chunk.extends, 32, 32 * 1024))
    assert profile.step_ms(chunk) < mixed < profile.step_ms(chunk) + profile.step_ms(decodes)


def test_a_shape_outside_is_refused_or_marked() -> None:
    profile = load_profile(NAME)
    just_outside = Step((Extend(128, 150_000),))
    assert not profile.covers(just_outside)
    assert profile.step_ms(just_outside) > profile.step_ms(Step((Extend(128, 131_072),)))
    for step in (Step((Extend(128, 300_000),)), Step((), 513, 513), Step((Extend(70_000, 0),))):
        with pytest.raises(OutsideProfileError):
            profile.step_ms(step)


def test_a_calibration_is_a_factor_and_a_constant() -> None:
    file = load_profile(NAME).file
    step = Step((), 8, 8 * 1000)
    calibrated = Profile(file, Calibration("engine", 1.5, 2.0, "a test"))
    assert calibrated.step_ms(step) == pytest.approx(1.5 * load_profile(NAME).step_ms(step) + 2)
    assert calibrated.provenance() == {
        "profile": NAME,
        "profile_source": f"{PACKAGE} {VERSION}",
        "calibration": "engine",
        "calibration_factor": 1.5,
        "calibration_step_ms": 2.0,
    }


def test_a_transfer_takes_its_bytes() -> None:
    assert load_profile(NAME).transfer_ms(8192, 100) == pytest.approx(85.9, abs=0.05)


def test_what_is_unknown_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no profile 'llama'.*{NAME}"):
        load_profile("llama")
    with pytest.raises(ConfigError, match="no calibration 'vllm'; it has device"):
        load_profile(NAME, "vllm")
    with pytest.raises(ConfigError, match="no recipe"):
        recipe_of("gpt")
    assert find("Qwen3-32B", "H100 SXM", 4) == "qwen3-32b-h100-tp4"
    with pytest.raises(ConfigError, match="no profile of Qwen3-32B on B200 TP4; there are"):
        find("Qwen3-32B", "B200", 4)
    with pytest.raises(ConfigError, match="no profile"):
        load_profile(str(tmp_path / "absent.json"))


def test_a_file_of_another_format_or_with_unknown_fields_is_refused(tmp_path: Path) -> None:
    fields = msgspec.json.decode((FOLDER / f"{NAME}.json").read_bytes())
    path = tmp_path / "profile.json"
    for change, message in (
        ({"format": 2}, "format 2, this version reads format 1"),
        ({"mood": "good"}, "unknown field `mood`"),
        ({"kv_bytes_per_token": "many"}, "kv_bytes_per_token"),
    ):
        path.write_bytes(msgspec.json.encode({**fields, **change}))
        with pytest.raises(ConfigError, match=message):
            read_file(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not a profile"):
        read_file(path)


def test_a_calibration_is_fitted_to_measured_steps(tmp_path: Path) -> None:
    profile = load_profile(NAME)
    shapes = [((), 1, 1000), ((), 64, 64_000), (((512, 4096),), 0, 0), (((8192, 0),), 0, 0)]
    steps = [MeasuredStep(1.0, *shape) for shape in shapes]
    measured = [
        msgspec.structs.replace(step, measured_ms=1.25 * profile.step_ms(step.step()) + 2.0)
        for step in steps
    ]
    file = calibrated(profile.file, "engine", measured, "a test")
    path = tmp_path / "profile.json"
    write_file(path, file)
    found = load_profile(str(path), "engine").calibration
    assert (found.factor, found.step_ms) == pytest.approx((1.25, 2.0), rel=1e-3)
    assert found.source == "a test; 4 steps, largest error 0.0%"
    again = calibrated(file, "engine", measured, "another")
    assert [one.name for one in again.calibrations] == ["device", "engine"]


def test_steps_that_allow_no_fit_are_refused(tmp_path: Path) -> None:
    file = load_profile(NAME).file
    step = MeasuredStep(10.0, (), 1, 1000)
    slower = [
        MeasuredStep(ms, (), batch, batch * 1000) for ms, batch in ((9, 1), (8, 64), (7, 128))
    ]
    with pytest.raises(ConfigError, match="three or more"):
        calibrated(file, "engine", [step, step, step], "a test")
    with pytest.raises(ConfigError, match="makes no sense"):
        calibrated(file, "engine", slower, "a test")
    with pytest.raises(ConfigError, match="stays as it is"):
        calibrated(file, "device", [step], "a test")
    path = tmp_path / "steps.json"
    for text in ("[1]", '[{"measured_ms": 0}]', "{"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="measured"):
            read_steps(path)
