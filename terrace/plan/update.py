"""Update rules of optimizers, which determine their state and messages. SGD without momentum has no state."""

from typing import Literal

Update = Literal["adamw", "lion", "muon", "sgd", "sgd+momentum"]
