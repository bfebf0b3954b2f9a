"""Pipeline schedules: pure functions from numbers to the order of tasks of every stage."""
