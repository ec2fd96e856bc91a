"""The command ``hypic``: one file per subcommand, and what they share. Importing it loads no torch."""
