"""What every command line shares: options, recipes, console, exit codes, and the contract of a verb."""
