"""Fixtures of several files here."""

import pytest

from .kubernetes.tools import MissingToolError, Tools


@pytest.fixture(scope="session")
def tools() -> Tools:
    """helm and kubectl."""
    try:
        return Tools.unpacked()
    except MissingToolError as error:
        pytest.fail(str(error))
