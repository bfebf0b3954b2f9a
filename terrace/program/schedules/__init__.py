"""Pipeline schedules: pure functions that return the order of tasks of every stage."""
