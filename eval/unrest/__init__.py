"""Our router under load while its workers die, hang and come back."""
