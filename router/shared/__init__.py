"""State that routers share over a Valkey or Redis server."""
