"""The simulator: prices the program that the runtime executes, and plays it forward in time."""
