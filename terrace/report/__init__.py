"""Human-readable output: tables and HTML pages of plans, steps and runs, and SVG charts."""
