"""The command line. Nothing heavy is imported before the arguments are parsed."""
