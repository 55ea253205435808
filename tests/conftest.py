"""For all tests."""

from hypothesis import settings

# The machine that runs them may be slow and shared; a deadline would test that.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
