"""Chats with passages from a pool: the demo, and what retrieval costs."""
