"""The `penstock` command. Each module adds one subcommand; nothing heavy is imported before it is needed."""
