"""What is counted, logged, traced and kept of decisions."""
