"""What lessons quote of a record is what stands in it, and where there is none they are told."""

import json

from mega_moe.recorded import RECORDS, Record, newest


def write(folder, date, ms, peak_bytes=2**21):
    row = dict(shape="tiny", contestant="grouped", direction="forward", gemm=None, peak_bytes=peak_bytes)
    product = row | dict(direction="backward", gemm="dact", peak_bytes=None)
    rows = [row | {"ms": {"median": ms}}, product | {"ms": {"median": ms / 2}}]
    machine = dict(device="NVIDIA H200", date=date, torch="2.11", triton="3.6")
    (folder / f"{date}-nvidia-h200.json").write_text(json.dumps(dict(machine=machine, problems={}, rows=rows)))


def test_the_newest_record_is_the_one_that_is_read(tmp_path):
    write(tmp_path, "2026-11-29", 3.0)
    write(tmp_path, "2026-12-01", 2.0)
    write(tmp_path, "2026-11-30", 1.0)
    record = newest(tmp_path)

    assert record and str(record) == "NVIDIA H200, 2026-12-01, torch 2.11, triton 3.6, medians"
    assert record.ms("tiny", "grouped", "forward") == 2.0
    assert record.ms("tiny", "grouped", "dact") == 1.0, "a product alone, by its name and not by its direction"
    assert record.peak_MiB("tiny", "grouped", "forward") == 2.0


def test_what_was_not_measured_is_none(tmp_path):
    write(tmp_path, "2026-11-29", 3.0)
    record = newest(tmp_path)

    assert record.ms("tiny", "swiglu", "forward") is None
    assert record.peak_MiB("tiny", "swiglu") is None
    assert record.peak_MiB("tiny", "grouped", "dact") is None, "a product alone has no peak"


def test_no_record_is_false_and_says_what_to_do(tmp_path):
    assert not newest(tmp_path) and newest(tmp_path) == Record()
    assert "make bench" in str(newest(tmp_path))


def test_the_checkouts_records_are_where_they_are_looked_for():
    assert RECORDS.is_dir() and newest()
