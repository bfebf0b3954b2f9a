"""Output for people: plans and step reports as tables and pages, loss curves as pictures."""
