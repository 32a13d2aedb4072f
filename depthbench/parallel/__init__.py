"""Process groups, what each parameter's declaration means under them, and Megatron-Core on machines without CUDA."""
