"""An actor and a critic, a DeepSpeed engine each, and a bare optimizer for a third part; prints losses by step."""

import json

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute; for inference only
ROUNDS = 6


class Actor(torch.nn.Linear):
    """The policy."""


class Critic(torch.nn.Linear):
    """The value of a state."""


def engine(model):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def main():
    torch.manual_seed(0)
    actor, critic = engine(Actor(8, 2)), engine(Critic(8, 1))
    temperature = torch.nn.Parameter(torch.ones(()))
    opt_temperature = torch.optim.SGD([temperature], lr=0.1)
    told, since = [], {}
    for number in range(ROUNDS):
        states = torch.randn(4, 8)
        value = critic(states).pow(2).mean()
        critic.backward(value)
        critic.step()
        policy = actor(states).pow(2).mean() * temperature.detach()
        actor.backward(policy)
        actor.step()
        told.append(since | {"Critic": value.item()})
        since = {"Actor": policy.item()}
        if number % 2:
            loss = (temperature - 0.5).pow(2)
            loss.backward()
            opt_temperature.step()
            opt_temperature.zero_grad()
            since["SGD"] = loss.item()
    print("losses", json.dumps(told), flush=True)
