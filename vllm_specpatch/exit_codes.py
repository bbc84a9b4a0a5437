"""What every command returns to the shell."""

GOOD, WRONG, CANNOT_TELL = 0, 1, 2
