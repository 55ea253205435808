"""The router's processes: their components, ports, start, reload and stop."""
