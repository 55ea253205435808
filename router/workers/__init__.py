"""The workers: who they are and how busy, how they come, are found, fail and go."""
