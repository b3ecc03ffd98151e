"""The CUDA kernels: how they are chosen, compiled and launched (docs/kernels.md). Their sources are in cuda/."""
