"""Parts of `bench_gpu`."""
