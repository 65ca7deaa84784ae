"""The record of what an engine emitted, on good disks and on full ones."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import numpy as np
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from tailrace_inference.adapters.emission_log import EmissionLog, read_emissions
from tailrace_protos.base import as_int32, pack_int32
from tailrace_protos.generation import TokenChunk


def test_the_emission_log_survives_a_torn_record(tmp_path: Path) -> None:
    path = tmp_path / "run" / "emissions-a.bin"
    log = EmissionLog(path)
    for index in range(3):
        log.append(f"e{index}", TokenChunk(f"c{index}", pack_int32([index, 7])))
    log.close()
    whole = path.read_bytes()
    for cut in (1, 5, 20):
        path.write_bytes(whole[:-cut])
        found = list(read_emissions(path))
        assert [emission.episode_id for emission in found] == ["e0", "e1"]
        assert as_int32(found[1].chunk.token_ids).tolist() == [1, 7]


def test_a_full_disk_costs_the_log_records_and_the_engine_nothing() -> None:
    log = EmissionLog(Path("/dev/full"))
    before = REGISTRY.get_sample_value("tailrace_inference_lost_emissions_total") or 0.0
    with capture_logs() as lines:
        for index in range(3):
            log.append(f"e{index}", TokenChunk(f"c{index}", pack_int32([index, 7])))
    log.close()
    assert log.num_lost == 3
    assert REGISTRY.get_sample_value("tailrace_inference_lost_emissions_total") == before + 3
    assert len([line for line in lines if "emissions" in line["event"]]) == 1


def test_a_record_that_the_disk_took_in_part_leaves_the_others_readable(tmp_path: Path) -> None:
    log = EmissionLog(tmp_path / "emissions.bin")
    chunk = TokenChunk("c", pack_int32(np.arange(1000)))
    log.append("before", chunk)
    size = (tmp_path / "emissions.bin").stat().st_size
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
    try:
        log.append("cut", chunk)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    log.append("after", chunk)
    log.close()
    found = [emission.episode_id for emission in read_emissions(tmp_path / "emissions.bin")]
    assert found == ["before", "after"]
    assert log.num_lost == 1


def test_a_restarted_server_appends_behind_the_last_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "emissions-a.bin"
    for episode, cut in (("e0", 0), ("torn", 3), ("e1", 0), ("torn", 1), ("e2", 0)):
        log = EmissionLog(path)
        log.append(episode, TokenChunk("c", pack_int32([7])))
        log.close()
        if cut:
            path.write_bytes(path.read_bytes()[:-cut])
    assert [emission.episode_id for emission in read_emissions(path)] == ["e0", "e1", "e2"]
