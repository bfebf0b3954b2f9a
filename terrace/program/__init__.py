"""The program: the instructions of each rank for one step, in order."""
