"""Muon for matrices and for batches of matrices, such as the experts of a mixture: [experts, rows, columns].

torch.optim.Muon takes matrices only, and computes in bfloat16. Here every matrix of the last two dims is orthogonalised
by itself, in its own dtype; what has less dims is updated by its momentum.
"""

import torch


def orthogonalised(matrices, steps):
    """The nearest (semi-)orthogonal matrices, about: a Newton-Schulz iteration drives all singular values to 1."""
    wide = matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide.mT if matrices.size(-2) > matrices.size(-1) else wide


class BatchedMuon(torch.optim.Optimizer):
    update_needs = "matrix"  # an update of an element needs its matrix: the last two dims, whole

    def __init__(self, params, lr=1e-3, momentum=0.95, weight_decay=0.1, steps=5):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"])
                if parameter.dim() > 1:
                    scale = max(1, parameter.size(-2) / parameter.size(-1)) ** 0.5
                    update = orthogonalised(update, group["steps"]) * scale
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        return loss
