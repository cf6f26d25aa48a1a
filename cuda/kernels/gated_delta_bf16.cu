// Gated DeltaNet over activations in bfloat16.
#include "device.cuh"
#include "gated_delta_entries.cuh"

GATED_DELTA(bf16, bf16)
