"""Measurements of the engine: later turns on each route, decodes beside prefills, a soak."""
