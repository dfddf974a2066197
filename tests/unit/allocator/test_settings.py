"""Values of PYTORCH_CUDA_ALLOC_CONF."""

import pytest
from ftmon.protocol.analysis.allocator.settings import MIB, Settings


def test_empty_text_gives_pytorchs_defaults() -> None:
    assert Settings.parse("") == Settings()


def test_options_are_read_with_their_units() -> None:
    settings = Settings.parse(
        "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,backend:native,"
        "pinned_use_background_threads:True,max_non_split_rounding_mb:64,per_process_memory_fraction:0.5"
    )
    assert settings == Settings(
        expandable_segments=True,
        max_split_size_bytes=128 * MIB,
        garbage_collection_threshold=0.8,
        max_non_split_rounding_bytes=64 * MIB,
        per_process_memory_fraction=0.5,
    )


def test_divisions_hold_from_their_size_on() -> None:
    settings = Settings.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8],expandable_segments:False")
    assert settings.roundup_power2_divisions == (1,) * 8 + (1, 2, 4) + (8,) * 5
    assert settings.rounded(600 * MIB) == 768 * MIB
    assert settings.rounded(1200 * MIB) == 1280 * MIB
    assert settings.rounded(3 * MIB + 1) == 3 * MIB + 512
    assert Settings.parse("roundup_power2_divisions:4").rounded(1200) == 1536


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("expandable_segments:yes", "must be True or False, not yes"),
        ("max_split_size_mb:8", "must be 20 or more, not 8"),
        ("max_split_size_mb:lots", "must be a whole number, not lots"),
        ("garbage_collection_threshold:1.5", "must be above 0 and below 1, not 1.5"),
        ("roundup_power2_divisions:3", "must be powers of two, not 3"),
        ("roundup_power2_divisions:[5:1]", "must be powers of two, not 5"),
        ("large_segment_size_mb:2", "must be more than 2, not 2"),
        ("expandable_segment:True", "expandable_segment is not an option"),
        ("backend:cudaMallocAsync", "use native"),
        ("expandable_segments", "must be OPTION:VALUE"),
    ],
)
def test_text_that_cannot_be_used_is_refused_with_the_option(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="PYTORCH_CUDA_ALLOC_CONF: ") as refused:
        Settings.parse(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_segment_sizes_follow_the_size_classes() -> None:
    settings = Settings()
    assert settings.segment_size(512) == settings.segment_size(MIB) == 2 * MIB
    assert settings.segment_size(MIB + 512) == settings.segment_size(10 * MIB - 512) == 20 * MIB
    assert settings.segment_size(10 * MIB) == 10 * MIB
    assert settings.segment_size(11 * MIB) == 12 * MIB
