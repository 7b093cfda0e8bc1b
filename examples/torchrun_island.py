"""Muon under ZeRO-3: every matrix whole on one rank. torchrun --nproc-per-node 2 examples/torchrun_island.py

Without transformers (`pip install 'atoll[hf]'`): --own trains Atoll's own decoder instead.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

# from torch.distributed.fsdp import fully_shard
from node.island import fully_shard
from node.island.optimizers import IslandOptimizer, PolarSteps

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--own", action="store_true")
options = parser.parse_args()

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
torch.manual_seed(0)  # the same weights on all ranks
if options.own:
    from node.model import LlamaShape, build_model

    model = build_model(LlamaShape(tied=False), seed=0).to(device)
    layers = model.layers
else:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).to(device)
    layers = model.model.layers
for layer in layers:
    fully_shard(layer)
fully_shard(model)
optimizer = IslandOptimizer(
    model, lambda groups: PolarSteps(groups, lr=0.02), lambda groups: torch.optim.AdamW(groups, lr=3e-3)
)

text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
chance = torch.Generator().manual_seed(dist.get_rank())
for step in range(options.steps):
    starts = torch.randint(0, len(text) - 65, (8,), generator=chance).tolist()
    tokens = torch.stack([text[start : start + 65] for start in starts])
    output = model(tokens[:, :-1])
    logits = output if options.own else output.logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    norm = model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item() / dist.get_world_size():.3f}, gradient norm {norm:.3f}")
dist.destroy_process_group()
