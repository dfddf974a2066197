"""The packages that ftmon's own trainer and its predictions need: ``ftmon[train]`` installs and a rank imports them."""

TRAINING_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "peft")
