"""Muon under ZeRO-3, matrices whole (extra hf): torchrun --nproc-per-node 2 examples/torchrun_island.py"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

# from torch.distributed.fsdp import fully_shard
from node.island import fully_shard
from node.island.optimizers import IslandOptimizer, PolarSteps

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
torch.manual_seed(0)  # the same weights on all ranks
sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).to(device)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = IslandOptimizer(
    model, lambda groups: PolarSteps(groups, lr=0.02), lambda groups: torch.optim.AdamW(groups, lr=3e-3)
)
text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
chance = torch.Generator().manual_seed(dist.get_rank())
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20):
    tokens = torch.stack([text[i : i + 64] for i in torch.randint(len(text) - 64, (8,), generator=chance)])
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
