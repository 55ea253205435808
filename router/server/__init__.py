"""The router's processes: their parts, ports, start, reload and stop."""
