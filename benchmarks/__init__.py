"""Times, memory and errors of convnormpool beside PyTorch's own ways: ``python -m benchmarks``."""
