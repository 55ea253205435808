"""All policies side by side, and what the weights move."""
