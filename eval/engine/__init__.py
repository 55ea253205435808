"""What a turn costs on each way, and the decodes beside it; a soak."""
