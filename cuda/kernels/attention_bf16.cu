// Attention of verify passes and draft blocks, bfloat16.
#include "device.cuh"

#include "attention.cuh"

ATTENTION(bf16, 16)
ATTENTION(bf16, 64)
ATTENTION(bf16, 128)
ATTENTION(bf16, 256)
