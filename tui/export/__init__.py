"""Exports of a recording: tables of its series, traces for Perfetto, memory snapshots for PyTorch's viewer."""
