"""Profiles: what the steps of a model on a GPU take, as tables that run without a GPU."""
