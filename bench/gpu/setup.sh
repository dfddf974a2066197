# Source on a GPU machine without a network, from the repository root, with the missing wheels in .whl:
# installs them beside the machine's own torch, makes this tree importable as `ftmon`. The wheels: deepspeed (built with
# DS_BUILD_OPS=0), hjson, pydantic, pydantic-core, annotated-types, typing-inspection, msgspec, pyzmq, textual, rich,
# platformdirs, linkify-it-py, mdit-py-plugins, uc-micro-py, plotext, shtab, datasets, dill, multiprocess, xxhash,
# pytest-asyncio; trl, liger-kernel and bitsandbytes for comparisons and QLoRA.
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit 1
ln -sfn "$PWD" /tmp/site/ftmon
export PYTHONPATH=/tmp/site TORCH_CUDA_ARCH_LIST=9.0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mkdir -p /tmp/bin && printf '#!/bin/sh\nexec python3 -m ftmon.tui.cli "$@"\n' > /tmp/bin/ftmon
printf '#!/bin/sh\nexec python3 -m deepspeed.launcher.runner "$@"\n' > /tmp/bin/deepspeed
chmod +x /tmp/bin/* && export PATH=/tmp/bin:$PATH
# What is missing is missed here, not ten minutes later.
python3 -c "import datasets, deepspeed, msgspec, peft, pytest_asyncio, textual, trl, zmq" || exit 1
