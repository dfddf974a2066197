#!/usr/bin/env bash
# datasets 5.2.0, pyarrow 26.0.1: a Parquet file whose first row group has no rows, which the format allows and writers
# of empty partitions make, cannot be read by load_dataset("parquet", ...), though the groups after it have rows; nor can
# a folder of files of which one is without rows, beside others with rows, be read. pyarrow itself reads both.
#
# Seen: ArrowInvalid "BatchSize must be greater than 0, got 0" for both, 3 rows by pyarrow.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
export HF_HOME="$folder/home" HF_DATASETS_OFFLINE=1
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_dataset

schema = pa.schema([("text", pa.string())])
rows = pa.table({"text": ["one", "two", "three"]}, schema=schema)
folder = Path(sys.argv[1]) / "parts"
folder.mkdir()


def write(path, *tables):
    with pq.ParquetWriter(path, schema) as writer:
        for table in tables:
            writer.write_table(table)


def told(**given):
    try:
        return load_dataset("parquet", split="train", cache_dir=f"{sys.argv[1]}/cache", **given).num_rows
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return f"{type(error).__name__}: {error}"


single = f"{sys.argv[1]}/single.parquet"
write(single, schema.empty_table(), rows)
write(folder / "a.parquet", rows)
write(folder / "b.parquet", schema.empty_table())
groups = [pq.ParquetFile(single).metadata.row_group(place).num_rows for place in range(2)]
found = [told(data_files=single), told(data_dir=str(folder))]
print(f"rows of the groups: {groups}; pyarrow: {pq.read_table(single).num_rows} and {pq.read_table(folder).num_rows} rows")
print(f"datasets: {found[0]}; {found[1]}")
assert groups == [0, 3]
assert pq.read_table(single).num_rows == pq.read_table(folder).num_rows == 3
assert found == ["ArrowInvalid: BatchSize must be greater than 0, got 0"] * 2, "they are read now"
PY
