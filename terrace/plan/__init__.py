"""The plan: where every state lives, on which tier every axis runs, in which format messages travel."""
