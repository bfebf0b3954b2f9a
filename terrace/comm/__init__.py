"""Communication: process groups and collectives by tier, the byte ledger, and the lanes that collectives run on."""
