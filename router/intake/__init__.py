"""What is let in: what a request may hold, who may send it, how much and when."""
