"""What operators ask and change, and the page they look at."""
