"""Chaos tests of our router: workers die, hang and come back under load."""
