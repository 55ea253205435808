"""Intake: checks of requests, API keys, rate limits, admission."""
