#!/usr/bin/env bash
# wandb 0.31.0: where wandb.init(mode="online") of a run with an id fails because its server does not answer, the fallback
# wandb.init(mode="offline") of the same id in the same process fails as well: it asks the server. Nothing is recorded.
#
# Seen: CommError, then ServerResponseError from the offline init; after wandb.teardown() the same call is offline at once.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet wandb==0.31.0
cd "$folder"
WANDB_API_KEY=$(printf '0%.0s' {1..40}) WANDB_BASE_URL=http://127.0.0.1:9 WANDB_SILENT=true "$folder/venv/bin/python" - <<'PY'
import wandb

settings = wandb.Settings(init_timeout=5, console="off")


def start(mode):
    try:
        run = wandb.init(project="p", id="one", resume="allow", mode=mode, settings=settings)
    except Exception as error:
        return type(error).__name__
    run.finish()
    return "offline" if run.offline else "online"


online, offline = start("online"), start("offline")
wandb.teardown()
found = [online, offline, start("offline")]
print(*found)
assert found[0] == "CommError", "the online init fails in another way now"
assert found[1] == "ServerResponseError", "the offline init works now"
assert found[2] == "offline"
PY
