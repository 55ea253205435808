"""The sources of conversations: traces, dialogues, generated workloads."""
