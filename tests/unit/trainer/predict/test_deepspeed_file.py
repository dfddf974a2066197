"""DeepSpeed's configuration, as far as a prediction reads it itself."""

import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.predict import deepspeed_file


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"zero_optimization": true}', "zero_optimization: must be an object, not bool"),
        ('{"zero_optimization": 3}', "zero_optimization: must be an object, not int"),
        ('{"zero_optimization": {"stage": "x"}}', "zero_optimization.stage: must be 0, 1, 2 or 3, not 'x'"),
        ('{"zero_optimization": {"stage": 7}}', "zero_optimization.stage: must be 0, 1, 2 or 3, not 7"),
        ('{"zero_optimization": {"stage": true}}', "zero_optimization.stage: must be 0, 1, 2 or 3, not True"),
        (
            '{"zero_optimization": {"offload_optimizer": "cpu"}}',
            "zero_optimization.offload_optimizer: must be an object, not str",
        ),
        (
            '{"zero_optimization": {"offload_param": {"device": "nvme"}}}',
            "zero_optimization.offload_param.device: nvme is not predicted, a dry run has no disk; predict with cpu",
        ),
        ('{"bf16": true}', "bf16: must be an object, not bool"),
        ('{"fp16": {"enabled": "yes"}}', "fp16.enabled: must be true or false, not 'yes'"),
        ('{"optimizer": null}', "optimizer: must be an object, not null"),
        ('{"optimizer": {"type": 3}}', "optimizer.type: must be a name, not int"),
        ('{"train_batch_size": "many"}', "train_batch_size: must be a whole number of 1 or more, not 'many'"),
        ('{"gradient_accumulation_steps": 0}', "gradient_accumulation_steps: must be a whole number of 1 or more"),
        ('{"tensor_parallel": {"autotp_size": 4}}', "tensor_parallel.autotp_size: is 4, but tensor parallelism"),
        ('{"pipeline": {"stages": 64}}', "pipeline.stages: is 64, but pipeline parallelism is not predicted"),
        ('{"sequence_parallel_size": 2}', "sequence_parallel_size: is 2, but sequence parallelism is not predicted"),
        ("[]", "must be a JSON object, not list"),
        ('{"bf16": {"enabled": ', "not JSON: "),
        ('{"bf16": {}, "bf16": {}}', "not JSON: bf16 is given twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_configuration_is_refused_with_its_file_and_key(tmp_path, text, reason):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        deepspeed_file.read(str(file))
    assert str(refusal.value).startswith(f"{file}: {reason}")
    assert len(str(refusal.value).splitlines()) == 1


def test_a_file_is_read_as_deepspeed_reads_it_and_what_that_refuses_is_found(tmp_path):
    with pytest.raises(ConfigError, match=r"^--deepspeed /no/such\.json: No such file or directory$"):
        deepspeed_file.read("/no/such.json")
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_batch_size": "auto", # ours\n "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},}'
    )
    assert deepspeed_file.read(str(file)) == {"zero_optimization": {"stage": 2}}
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n"optimizer": {"type": "Sophia"},\n"zero_optimization": {\n"offload_optimizer": {\n"device": "gpu"}}}\n'
    )
    assert deepspeed_file.place(str(path), "offload_optimizer.device: Input should be 'cpu'") == f"{path}:5"
    assert deepspeed_file.place(str(path), "Sophia is not a supported DeepSpeed Optimizer") == f"{path}:2"
    assert deepspeed_file.place(str(path), "something else") == str(path)


def test_keys_that_deepspeed_ignores_and_entries_that_are_left_out_are_noted(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimisation": {"stage": 2}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}')
    notes: list[str] = []
    deepspeed_file.read(str(file), notes)
    assert notes == [
        f"{file}: 'auto' entries are left out: bf16.enabled, gradient_clipping",
        f"{file}: unknown key zero_optimisation is ignored by DeepSpeed; did you mean zero_optimization?",
    ]
    notes.clear()
    file.write_text('{"train_batch_size": 2, "zero_optimization": {"stage": 2}, "fp16": {}, "tensor_parallel": {}}')
    deepspeed_file.read(str(file), notes)
    assert notes == []


def test_the_batch_follows_deepspeeds_rules():
    entries = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    whole = {"train_batch_size": 64}
    for settings, micro, accumulation, batch in (
        *((entries, None, None, (4, 2)), (whole, None, None, (8, 1)), (whole, 2, None, (2, 4))),
        *((whole, None, 2, (4, 2)), ({"train_micro_batch_size_per_gpu": 4}, None, None, (4, 1))),
        *(({}, None, None, (1, 1)), (entries, 1, 1, (1, 1))),  # the command line wins over the file
    ):
        assert deepspeed_file.batch(settings, 8, micro, accumulation) == batch
    with pytest.raises(ValueError, match="train_batch_size: is 64, but 7 ranks x micro-batch 4 x accumulation 2 is 56"):
        deepspeed_file.batch(entries, 7, None, None)
    with pytest.raises(ValueError, match="train_batch_size: is 4, but 8 ranks"):
        deepspeed_file.batch({"train_batch_size": 4}, 8, None, None)


@pytest.mark.parametrize(("device", "offloads"), [("cpu", True), ("none", False)])
def test_offload_to_none_is_no_offload(device, offloads):
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}}}
    assert deepspeed_file.offloads(zero) is offloads
