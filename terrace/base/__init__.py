"""What every room may use: errors, strict loading of tables, atomic files."""
