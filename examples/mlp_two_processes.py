"""A feed-forward block divided by columns, then by rows: the same output on one process and on two.

    python examples/mlp_two_processes.py
    torchrun --nproc_per_node 2 examples/mlp_two_processes.py

Each process holds half of both matrices. The first product is divided by output features and needs no message; the second is divided
by input features, and its partial results are summed over the processes.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

from dufu import distributed
from dufu.layers import Linear


class FeedForward(nn.Module):
    def __init__(self, hidden_size: int = 8, ffn_hidden_size: int = 32) -> None:
        super().__init__()
        self.expand = Linear(hidden_size, ffn_hidden_size, parallel="col")
        self.contract = Linear(ffn_hidden_size, hidden_size, parallel="row")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.contract(functional.gelu(self.expand(x)))


torch.manual_seed(1234)
model = distributed.parallelize(FeedForward())
x = torch.randn(2, 8, device=next(model.parameters()).device)
y = model(x)
y.square().mean().backward()

part = tuple(model.expand.weight.shape)
# written in one piece, so that the lines of two processes do not run into each other
sys.stderr.write(f"process {distributed.rank()} of {distributed.world_size()} holds {part} of (32, 8)\n")
if distributed.is_main_process():
    for row in y.tolist():
        print(" ".join(f"{value:8.4f}" for value in row))
    print(f"gradient norm of the bias: {model.contract.bias.grad.norm().item():.4f}")
