"""Trainings with faults that raise no error, one after the other: prints the first step of each as JSON."""

import copy
import json
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

END, STEPS = 3, 6
begun: dict[str, int] = {}
done = 0
models: list[torch.nn.Module] = []
"""All of them: the probe looks at the model of a step a little later."""


def batch(kind: str) -> dict[str, torch.Tensor]:
    """Two rows of two documents of 8 tokens; the second ends before its three tokens of padding."""
    ids = torch.randint(4, 64, (2, 16))
    ids[:, 7], ids[:, 12:] = END, END
    mask = torch.ones_like(ids)
    mask[:, 13:] = 0
    made = {"input_ids": ids, "labels": torch.where(mask == 1, ids, -100), "attention_mask": mask}
    if kind.startswith("packed"):
        made["position_ids"] = torch.arange(8).repeat(2, 2)
        made["attention_mask"] = torch.ones_like(mask)
    if kind in ("packed, cache", "packed, right"):
        del made["attention_mask"]
    if kind.endswith("no end"):
        made["labels"] = torch.where(ids == END, -100, ids)
    if kind.endswith("no labels"):
        made["labels"] = torch.full_like(ids, -100)
    return made


def train(kind: str) -> None:
    global done
    begun[kind] = done + 1
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        **sizes, vocab_size=64, eos_token_id=END, attention_dropout=0.1, use_cache=kind == "packed, cache"
    )
    model = LlamaForCausalLM(config).train(kind != "evaluation")
    if kind == "packed, encoder":
        model = BertForMaskedLM(BertConfig(**sizes, vocab_size=64)).train()
    others = LlamaForCausalLM(config).requires_grad_(False)
    models.append(model)
    if kind.startswith("a part"):
        model.model.eval().requires_grad_(kind != "a part, frozen")
    if kind == "frozen":
        model.requires_grad_(False)
        model.scale = torch.nn.Parameter(torch.zeros(1))
    updated = copy.deepcopy(model) if kind == "another model" else model
    models.append(updated)  # once what was updated is gone, steps may count from 1 again
    optimizer = torch.optim.AdamW([each for each in updated.parameters() if each.requires_grad], lr=1e-3)
    rows_of = [batch(kind) for _ in range(STEPS)]
    loader = DataLoader(range(STEPS) if kind.startswith(("later", "by hand")) else rows_of, batch_size=None)
    for step, rows in enumerate(rows_of if kind.startswith("plain") else loader):
        rows = rows_of[step] if kind.startswith(("later", "by hand")) else rows
        if kind == "plain, fine" and not step:  # a forward of another model, and one more of the micro-batch
            others(**rows), model(**rows)
        if kind.endswith("not shifted"):
            loss = cross_entropy(model(**rows).logits.transpose(1, 2), rows.pop("labels"))
        elif kind == "shifted twice":
            loss = model(**rows | {"labels": torch.nn.functional.pad(rows["labels"][:, 1:], (0, 1), value=-100)}).loss
        elif kind.startswith("by hand"):
            labels = rows.pop("labels")[:, 1:]
            loss = cross_entropy(model(**rows).logits[:, :-1].transpose(1, 2), labels) / 2
        else:
            loss = model(**rows).loss
        if kind.endswith("no labels"):
            loss = torch.nan_to_num(loss)
        if kind == "frozen":
            loss = loss.detach() + 0 * model.scale.sum()
        if kind == "backward" and step == 5:
            loss = loss + (0 * model.lm_head.weight.sum()).sqrt()
        if kind == "backward, elsewhere" and step == 4:  # of what is not sampled
            loss = loss + (0 * model.model.norm.weight.sum()).sqrt()
        loss.backward()
        if kind == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
    time.sleep(0.3)  # its steps are examined, by its model, before the next training begins


for kind in (  # of the first 64 micro-batches each is examined
    *("plain, fine", "later, no end", "by hand, no end", "fine", "no end"),
    *("packed, mask", "packed, cache", "packed, encoder", "plain, no labels", "by hand, no labels"),
    *("no labels", "packed, right", "evaluation", "a part, frozen", "a part", "frozen"),
    *("backward", "backward, elsewhere", "another model"),
    *("clipped", "not shifted", "shifted twice", "plain, not shifted"),
):
    train(kind)
print("begun", json.dumps(begun), flush=True)
