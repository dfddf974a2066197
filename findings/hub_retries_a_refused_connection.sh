#!/usr/bin/env bash
# huggingface_hub: a file of a hub that cannot be reached is asked for six times, with pauses of 1, 2, 4, 8 and 8 s, also
# where the connection is refused at once; each file that a library looks for waits anew. No environment variable changes
# the number of attempts: HF_HUB_ETAG_TIMEOUT limits one attempt only.
#
# Seen with 2.4.0, 2026-11-28 (a local port that refuses connections stands for the hub):
#   a refused connection is reported after 23 s, HF_HUB_ETAG_TIMEOUT=1 or not
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q huggingface_hub==2.4.0
cat > "$folder/refused.py" <<'PYTHON'
import os, socket, time

with socket.create_server(("127.0.0.1", 0)) as taken:
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{taken.getsockname()[1]}"  # refused once it is closed
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError

begun = time.monotonic()
try:
    hf_hub_download("name/model", "config.json")
except LocalEntryNotFoundError:
    print(round(time.monotonic() - begun))
PYTHON
export HF_HOME="$folder/home"
plain=$("$folder/venv/bin/python" "$folder/refused.py")
limited=$(HF_HUB_ETAG_TIMEOUT=1 "$folder/venv/bin/python" "$folder/refused.py")
echo "a refused connection is reported after $plain s; with HF_HUB_ETAG_TIMEOUT=1 after $limited s"
[ "$plain" -ge 20 ] && [ "$limited" -ge 20 ]
