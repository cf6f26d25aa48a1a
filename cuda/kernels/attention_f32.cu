// Attention of verify passes and draft blocks, float32.
#include "device.cuh"

#include "attention.cuh"

ATTENTION(f32, 16)
ATTENTION(f32, 64)
ATTENTION(f32, 128)
ATTENTION(f32, 256)
