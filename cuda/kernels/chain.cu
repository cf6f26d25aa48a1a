// The Markov chain: drafted tokens, their laws and their confidences from a backbone's base logits.
#include "device.cuh"
#include "chain.cuh"

using sampling::SampleArgs;

// For the 1, see sampling.cu.
KERNEL(chain_latent, SampleArgs, 128, 1) { sampling::latent(args); }
KERNEL(chain_bend, SampleArgs, 128) { sampling::bend(args); }
KERNEL(chain_draw, SampleArgs, 256, 1) { sampling::draw(args); }
KERNEL(chain_confide, SampleArgs, 32) { sampling::confide(args); }
