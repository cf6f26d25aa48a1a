// Attention of verify passes and draft blocks, float16.
#include "device.cuh"

#include "attention.cuh"

ATTENTION(f16, 16)
ATTENTION(f16, 64)
ATTENTION(f16, 128)
ATTENTION(f16, 256)
