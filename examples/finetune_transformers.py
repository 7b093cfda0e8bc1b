"""A model of transformers (extra hf) goes on learning on several nodes, from text that each of them holds.

export MODEL=HuggingFaceTB/SmolLM2-135M   # or a folder; without it a small model with random weights
atoll run init tune.toml --model examples/finetune_transformers.py:make_model --nodes 2 --rounds 100
atoll coordinator tune.toml                          # prints an invite
python examples/finetune_transformers.py INVITE      # on each node
"""

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import atoll

MODEL = os.environ.get("MODEL", "")
CONTEXT = 64
SMALL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_model() -> PreTrainedModel:
    """The model in fp32, as what is exchanged has to be."""
    if MODEL:
        return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, trust_remote_code=False)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **SMALL))


def windows() -> torch.Tensor:
    """Token ids of this folder's files, ``int64[n, CONTEXT]``: bytes where there is no tokenizer."""
    text = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
    if MODEL:
        ids = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)(text)["input_ids"]
    else:
        ids = list(text.encode())
    return torch.tensor(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT)


def main(where: str) -> float:
    """Train; returns the loss of the last batch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = windows().to(device)
    with atoll.local(where) if where.endswith(".toml") else atoll.join(where) as run:
        torch.manual_seed(run.seed)
        model = make_model().to(device)
        optimizer = run.optimizer(model)
        for step, batch in enumerate(run.batches(len(tokens))):
            optimizer.zero_grad()
            loss = model(input_ids=tokens[batch], labels=tokens[batch]).loss
            loss.backward()
            run.report(loss)
            optimizer.step()
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.3f}")
    with optimizer.evaluating():  # the weights that all nodes agree on
        model.save_pretrained("tuned")
    return loss.item()


if __name__ == "__main__":
    main(sys.argv[1])
