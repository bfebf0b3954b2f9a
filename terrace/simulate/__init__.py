"""The simulator: the very program that the runtime executes, priced and played forward in time."""
