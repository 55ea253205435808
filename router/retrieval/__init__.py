"""Retrieval inside serving: passages are inserted at the end of a conversation.

The text of a chat's new turn is searched for in a vector-search pool, and the passages found are
inserted into that turn's own message. Everything before it stays as the decode worker holds it, so
the turn can be a local append-prefill. Clients send their history without passages; the router
stores them and inserts them again.
"""
