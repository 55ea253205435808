"""The router's metrics, logs, journal of decisions and traces."""
