"""How the tokens of a micro-batch are spread over the ranks that attend to them together. Pure: no torch, no numpy."""
