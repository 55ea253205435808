"""What a router costs, ours and others'."""
