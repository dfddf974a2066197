"""A sweep on real GPUs: predicted beside measured, out of memory as a row, and GPUs that are empty afterwards."""

from pathlib import Path

import pytest
from ftmon.protocol.sweep.rows import read
from ftmon.trainer.recipe.config import write
from ftmon.trainer.recipe.hardware import usable_gpus
from ftmon.trainer.recipe.start import demo_config
from ftmon_process import Ftmon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu_alone,
    pytest.mark.skipif(not usable_gpus(), reason="no GPU that PyTorch could use"),
]


@pytest.mark.timeout(900)
def test_a_sweep_measures_what_was_predicted_and_leaves_the_gpus_empty(home: Ftmon, tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(write.dump(demo_config(["run.ranks=1"]).config))
    sweep = tmp_path / "lengths.yaml"
    sweep.write_text(
        "config: train.yaml\naxes:\n  training.sequence_length: [128, 512]\n"
        "  debug.fault: ['', 'oom:rank=0,step=3']\nsteps: 4\n"
    )
    done = home.run("sweep", str(sweep), seconds=800)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read(tmp_path / "lengths.results.jsonl").rows
    assert len(rows) == 4
    for row in rows:
        assert row.note == "", "nothing of it is left on the GPUs"
        if row.settings["debug.fault"]:
            assert (row.verdict, row.phase, row.rank, row.step) == ("out-of-memory", "forward", 0, 3)
            assert row.asked_bytes > 8 << 30
            continue
        assert row.verdict == "done", row.text
        assert row.predicted is not None, done.stdout
        assert row.predicted.fits
        assert row.peak_bytes == pytest.approx(row.predicted.peak_bytes, rel=0.05)
        (rank,) = row.ranks
        assert 0 < row.peak_bytes <= rank.reserved_peak_bytes
        assert rank.phases["forward"].device_ms is not None
    done = home.run("report", str(tmp_path / "lengths.results.jsonl"), "--html", str(tmp_path / "r.html"))
    assert done.returncode == 0, done.stderr
