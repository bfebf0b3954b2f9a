"""Roles of learning from feedback on pools of devices: the price of an iteration, and the fastest placement."""
