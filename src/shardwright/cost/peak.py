from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    peak: float = 0.0
    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0
def peak(*args): return Memory()
