"""What conversations are made of: traces, dialogues, generated workloads."""
