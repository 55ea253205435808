"""Serving: one request parsed, admitted, planned, sent, relayed, recorded."""
