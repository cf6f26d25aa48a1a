// Gated DeltaNet over activations in float32.
#include "device.cuh"
#include "gated_delta_entries.cuh"

GATED_DELTA(f32, float)
