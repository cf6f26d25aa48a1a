// Gated DeltaNet over activations in float16.
#include "device.cuh"
#include "gated_delta_entries.cuh"

GATED_DELTA(f16, f16)
