"""The sub-commands of the command line."""
