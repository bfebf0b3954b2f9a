"""Numbers of plans that bound a search. Here, since a command line shows them without the planner."""

FINALISTS = 5  # best plans of a search among which ties are settled; a search that chooses a plan has at least as many
MOST_PLAYED = 24  # plans, unless --limit says otherwise
