"""Retrieval inside serving: passages placed at the tail of a conversation.

A chat's new turn is searched for in a pool of vectors, and what is found goes into that turn's own
message: all before it stays as the decode worker has it, so it remains a local append-prefill.
Clients send their history without passages; the router remembers them, and puts them back.
"""
