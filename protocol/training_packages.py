"""The packages that ftmon's own trainer and its predictions need: what ``ftmon[train]`` installs and a rank imports."""

TRAINING_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "peft")
