// Known bugs of speculative decoding (rust/src/mutant.rs), planted by tests to prove that they would be caught. In the
// product PLANTED is the constant false and its branches are compiled away.
#pragma once

#ifdef PLANTED_FAULTS
namespace sampling {
enum Fault {
  NO_FAULT,
  SHARED_STREAM,        // the draft's noise and the residual's come from one stream
  REUSED_UNIFORM,       // the acceptance test's number draws from the residual too
  ROUNDED_DRAFT_LAW,    // the acceptance test sees the draft's probabilities in another precision
  POSITION_KEYS,        // noise counted by absolute position, not by round and slot
  TARGET_ARGMAX,        // the target's rows judged by their largest logit
  EMPTY_CUT_REJECTS,    // a cut before the first token treated as its rejection
  STALE_TOKEN,          // a step of the chain reads the token before the one just drawn
  TIES_BY_RANK_ONLY,    // all logits equal to the last one that stays, stay
};
inline int planted = NO_FAULT;
}  // namespace sampling
extern "C" __attribute__((used)) inline void plant(int fault) { sampling::planted = fault; }
#define PLANTED(fault) (sampling::planted == sampling::fault)
#else
#define PLANTED(fault) false
#endif
