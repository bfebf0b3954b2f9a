"""Communication: groups by tier, collectives by tier with the byte ledger, and the lane they run on."""
