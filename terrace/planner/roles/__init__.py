"""Roles of learning from feedback on pools of devices: what an iteration costs, and which placement is the fastest."""
