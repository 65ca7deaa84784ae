"""The parts of `benchmarks.bench_transport`: the payload, servers, callers."""
