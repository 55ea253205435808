"""Answers kept in the vector-search pool, for questions that mean the same."""
