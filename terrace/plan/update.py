"""How an optimizer updates parameters: its state and messages depend on it. Without momentum SGD has no state."""

from typing import Literal

Update = Literal["adamw", "lion", "muon", "sgd", "sgd+momentum"]
