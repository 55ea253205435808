"""Clients that others wrote, through the router, on real workers."""
