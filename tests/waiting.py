"""How long a test waits for what has to come."""

HANG_S = 60.0
"""Whatever takes longer hangs. It measures nothing: a busy machine may stall for seconds."""
