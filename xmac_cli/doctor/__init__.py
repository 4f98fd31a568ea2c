"""doctor: what is installed here, what is missing, and the command that gets it."""
