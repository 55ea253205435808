"""HTTP/1.1 for the token path: a server and a client on raw asyncio protocols.

The package has no notion of models or routes. Every chunk of every stream passes through the
router. There aiohttp would cost more than the rest of a turn. llhttp (through httptools) parses
the messages strictly. ``reading.py`` refuses what llhttp accepts and this server does not.
"""
