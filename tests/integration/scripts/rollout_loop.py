"""A loop like GRPO's: generate, score, then train on what was generated; it knows nothing of ftmon."""

import json
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def step(model, optimizer, prompts, evaluates):
    """Evaluates: the model generates in evaluation mode."""
    begun = time.perf_counter()
    if evaluates:
        model.eval()
    with torch.no_grad():
        texts = model.generate(prompts, max_new_tokens=16, min_new_tokens=16, do_sample=True)
    model.train()
    generated = time.perf_counter()
    rewards = (texts > 64).float().mean(1)
    logits = model(texts).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(-1, texts[:, 1:, None])[..., 0].mean(1)
    loss = -(chosen * (rewards - rewards.mean())).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    figures = {"generate": generated - begun, "step": time.perf_counter() - begun, "loss": loss.item()}
    print(json.dumps(figures), flush=True)


def main():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    model = GPT2LMHeadModel(config)
    model.generation_config.pad_token_id = 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.randint(3, 128, (16, 8)), batch_size=4)
    time.sleep(5.0)  # start-up that is no part of any step, with a heartbeat in it however late the first one is
    for prompts in loader:
        step(model, optimizer, prompts, evaluates=False)
    for _ in range(2):
        step(model, optimizer, torch.randint(3, 128, (4, 8)), evaluates=True)
    model.eval()
    with torch.no_grad():
        for prompts in loader:
            model.generate(prompts, max_new_tokens=2)
