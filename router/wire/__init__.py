"""HTTP/1.1 for the token path: a server and a client on raw asyncio protocols.

Knows nothing of models or routes. aiohttp would cost more than all the rest of a turn: the
router is on the path of every chunk of every stream. llhttp (through httptools) reads the
messages, strictly; what it lets pass and we do not is refused in ``server.py``.
"""
