"""Other APIs than the engine's own, served as chat completions."""
