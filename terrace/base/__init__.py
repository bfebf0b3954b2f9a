"""Tools for every room: errors, strict loading of tables, atomic files."""
