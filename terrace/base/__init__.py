"""Tools for every package: errors, strict loading of tables, atomic files."""
